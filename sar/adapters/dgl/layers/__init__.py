"""DGL's layers on distributed graphs."""
