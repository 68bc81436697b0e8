"""What stands behind the site: pages and snippets that are written before each build."""
