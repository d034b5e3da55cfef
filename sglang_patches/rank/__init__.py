"""What a rank runs: SGLang's scheduler over EEP's data plane, one step after the other."""
