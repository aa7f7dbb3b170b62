"""Train steps written with other people's packages. None of these packages is needed elsewhere: `make ecosystem`."""
