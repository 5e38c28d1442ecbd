"""`python -m polar`: the `polar` command, for where the script is not on the path."""

from polar.cli.main import main

main()
