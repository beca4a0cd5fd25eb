"""What tests share. Fixtures are in the `conftest.py` of the folder whose tests use them."""
