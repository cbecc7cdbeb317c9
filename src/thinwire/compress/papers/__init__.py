"""Methods of papers that are here to compare with: nobody should start with them."""
