// Types of numbers in memory: how fp32 is read from them, and rounded to them.

typedef long long Count;

struct Stretch {
    Count begin, end;
};

ON_DEVICE Count least(Count a, Count b) { return a < b ? a : b; }

ON_DEVICE bool is_nan(float value) { return (__float_as_uint(value) & 0x7FFFFFFFu) > 0x7F800000u; }

// `nearest` rounds sums (ties to even, as torch does), `weight` rounds masters to weights, which are
// masters themselves if IS_MASTER.
struct Bf16 {
    typedef unsigned short Bits;
    static const bool IS_MASTER = false;
    static const unsigned short QUIET_NAN = 0x7FC0;

    ON_DEVICE static float load(Bits bits) { return __uint_as_float((unsigned)bits << 16); }

    ON_DEVICE static Bits nearest(float value) {
        unsigned bits = __float_as_uint(value);
        return is_nan(value) ? QUIET_NAN : (Bits)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }

    // Ties away from zero: docs/decisions/010-rounding-of-masters.md.
    ON_DEVICE static Bits weight(float value) {
        return is_nan(value) ? QUIET_NAN : (Bits)((__float_as_uint(value) + 0x8000u) >> 16);
    }
};

struct Fp16 {
    typedef unsigned short Bits;
    static const bool IS_MASTER = false;

    ON_DEVICE static float load(Bits bits) { return half_to_float(bits); }
    ON_DEVICE static Bits nearest(float value) { return float_to_half(value); }
    ON_DEVICE static Bits weight(float value) { return float_to_half(value); }
};

struct Fp32 {
    typedef float Bits;
    static const bool IS_MASTER = true;

    ON_DEVICE static float load(Bits bits) { return bits; }
    ON_DEVICE static Bits nearest(float value) { return value; }
    ON_DEVICE static Bits weight(float value) { return value; }
};
