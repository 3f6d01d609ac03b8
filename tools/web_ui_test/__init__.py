"""Parts of tools/web-ui-test.py."""
