"""axsparse beside what users would otherwise pick, on one model, one token stream, one AdamW."""
