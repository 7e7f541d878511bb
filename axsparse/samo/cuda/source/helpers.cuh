// Moves values between dense and kept form.

// Calls `each(k, position)` for the kept entries of [start, stop) in this thread block's chunk.
template <typename Index, typename Each>
ON_DEVICE void walk(Index& index, Count start, Count stop, Each each) {
    Count first = start + (Count)blockIdx.x * CHUNK, last = least(first + CHUNK, stop);
    index.seek(first);
    for (Count from = first; from < last;) {
        Count until = index.advance(from, last);
#pragma unroll LOADS
        for (Count k = from + threadIdx.x; k < until; k += THREADS) each(k, index.position(k));
        from = until;
    }
}

// Copies all of `values_K` to or from the kept entries [start, stop).
template <typename Index, typename Bits>
__global__ void move(Bits* dense_D, const void* entries, const int* offsets, Count kept, Count numel,
                     Bits* values_K, Count start, Count stop, int into_dense) {
    Index index(entries, offsets, kept, numel);
    if (into_dense) {
        walk(index, start, stop,
             [=](Count k, Count position) { dense_D[position] = values_K[k - start]; });
    } else {
        walk(index, start, stop,
             [=](Count k, Count position) { values_K[k - start] = dense_D[position]; });
    }
}
