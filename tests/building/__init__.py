"""What a build is told before any work starts."""
