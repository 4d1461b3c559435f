"""The command line. Options come from the fields of dataclasses (`hpcfed.cli.flags`)."""
