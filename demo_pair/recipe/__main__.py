"""`python -m demo_pair.recipe`: see `make.py`."""

from demo_pair.recipe.make import main

main()
