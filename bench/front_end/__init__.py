"""What a request costs the front end when thousands are open."""
