"""Operations on the paged KV cache: store, copy blocks, compact, gather. One implementation for each kind of device."""
