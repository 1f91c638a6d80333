"""Reports on partition directories, and checks of them."""
