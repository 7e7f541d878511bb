// Kernels that make indices of masks, decode them, and move values between dense and kept form.

// This thread's 32 entries of a tile of a boolean mask as bits, the first one in the lowest.
ON_DEVICE unsigned word_of(const unsigned char* mask, Count numel) {
    __shared__ unsigned char bytes[TILE];
    Count start = (Count)blockIdx.x * TILE;
    for (int i = threadIdx.x; i < TILE; i += THREADS) {
        bytes[i] = start + i < numel ? mask[start + i] : (unsigned char)0;
    }
    __syncthreads();
    unsigned word = 0;
    for (int i = 0; i < 32; ++i) word |= (unsigned)(bytes[threadIdx.x * 32 + i] != 0) << i;
    return word;
}

// Counts the kept entries of each MASK_BLOCK of a mask.
__global__ void count_kept(const unsigned char* mask, Count numel, int* counts) {
    const int each = MASK_BLOCK / 32;
    __shared__ int before[TILE / MASK_BLOCK + 1];
    unsigned word = word_of(mask, numel);
    int sum = sum_before(__popc(word));
    if (threadIdx.x % each == 0) before[threadIdx.x / each] = sum;
    if (threadIdx.x == THREADS - 1) before[TILE / MASK_BLOCK] = sum + __popc(word);
    __syncthreads();
    Count block = (Count)blockIdx.x * (TILE / MASK_BLOCK) + threadIdx.x;
    if (threadIdx.x < TILE / MASK_BLOCK && block * MASK_BLOCK < numel) {
        counts[block] = before[threadIdx.x + 1] - before[threadIdx.x];
    }
}

// Writes the kept positions of a mask, ascending. `offsets` counts the kept entries before each
// MASK_BLOCK.
__global__ void number_kept(const unsigned char* mask, Count numel, const int* offsets,
                            int* entries) {
    __shared__ unsigned short places[TILE];
    spread(word_of(mask, numel), places);
    Count start = (Count)blockIdx.x * TILE, blocks = (numel + MASK_BLOCK - 1) / MASK_BLOCK;
    Count begin = offsets[(Count)blockIdx.x * (TILE / MASK_BLOCK)];
    Count end = offsets[least(((Count)blockIdx.x + 1) * (TILE / MASK_BLOCK), blocks)];
    for (Count k = begin + threadIdx.x; k < end; k += THREADS) {
        entries[k] = (int)(start + places[k - begin]);
    }
}

// Writes a mask as one bit an entry, in words of 32 bits, of which there is an even number.
__global__ void pack(const unsigned char* mask, Count numel, unsigned* words) {
    unsigned word = word_of(mask, numel);
    Count at = (Count)blockIdx.x * THREADS + threadIdx.x;
    if (at < (numel + MASK_WORD - 1) / MASK_WORD * (MASK_WORD / 32)) words[at] = word;
}

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

template <typename Index>
__global__ void positions(const void* entries, const int* offsets, Count kept, Count numel,
                          Count* found) {
    Index index(entries, offsets, kept, numel);
    walk(index, 0, kept, [=](Count k, Count position) { found[k] = position; });
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
