"""What every room may use: errors, files that appear whole, the run folder, languages, messages. No torch."""
