"""axsparse next to what users would otherwise pick, on one model, one token stream, one AdamW."""
