"""Cross-mesh resharding: values that lie on one mesh are brought to another at the bandwidth bound."""
