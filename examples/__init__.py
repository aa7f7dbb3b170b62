"""Programs that use autopar as any user would."""
