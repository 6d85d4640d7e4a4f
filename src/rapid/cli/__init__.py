"""The command line over the library. Floor 7."""
