"""What every room may use: errors, files that appear whole, the run folder, the line protocol, languages. No torch."""
