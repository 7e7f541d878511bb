// Arithmetic of a GPU: each operation rounds once and keeps subnormal numbers. On NVIDIA's it is
// written as instructions, because CuPy compiles with -ftz=true, under which operators, conversions
// and even a minus sign flush subnormal numbers to zero. On AMD's, which have not been tried, it is
// operators that must not be contracted; there CuPy's options flush subnormal numbers.

#define ON_DEVICE __device__ __forceinline__

#if defined(__HIP__) || defined(__HIPCC_RTC__)

#pragma clang fp contract(off)

ON_DEVICE float add(float a, float b) { return a + b; }

ON_DEVICE float subtract(float a, float b) { return a - b; }

ON_DEVICE float multiply(float a, float b) { return a * b; }

// a·b + c with one rounding.
ON_DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

ON_DEVICE float divide(float a, float b) { return a / b; }

ON_DEVICE float root(float a) { return __builtin_sqrtf(a); }

ON_DEVICE double widen(float a) { return a; }

ON_DEVICE float narrow(double a) { return (float)a; }

// Ties to even.
ON_DEVICE long long nearest_integer(double a) { return (long long)__builtin_rint(a); }

ON_DEVICE float half_to_float(unsigned short bits) {
    return (float)__builtin_bit_cast(_Float16, bits);
}

// Rounds to the nearest, ties to even.
ON_DEVICE unsigned short float_to_half(float value) {
    return __builtin_bit_cast(unsigned short, (_Float16)value);
}

// As below; a wavefront of 64 is two times 32.
template <typename Value>
ON_DEVICE Value from_lane_before(Value value, int distance) {
    return __shfl_up(value, distance, 32);
}

template <typename Value>
ON_DEVICE Value from_lane_behind(Value value, int distance) {
    return __shfl_down(value, distance, 32);
}

#ifndef __grid_constant__
#define __grid_constant__
#endif

#else

#define INSTRUCTION(Result, name, parameters, ...) \
    ON_DEVICE Result name parameters {             \
        Result result;                             \
        asm(__VA_ARGS__);                          \
        return result;                             \
    }

INSTRUCTION(float, add, (float a, float b),
            "add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b))
INSTRUCTION(float, subtract, (float a, float b),
            "sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b))
INSTRUCTION(float, multiply, (float a, float b),
            "mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b))
// a·b + c with one rounding.
INSTRUCTION(float, multiply_add, (float a, float b, float c),
            "fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c))
INSTRUCTION(float, divide, (float a, float b),
            "div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b))
INSTRUCTION(float, root, (float a), "sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a))
INSTRUCTION(double, widen, (float a), "cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(a))
INSTRUCTION(float, narrow, (double a), "cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(a))
// Ties to even.
INSTRUCTION(long long, nearest_integer, (double a),
            "cvt.rni.s64.f64 %0, %1;" : "=l"(result) : "d"(a))
INSTRUCTION(float, half_to_float, (unsigned short bits),
            "cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits))
// Rounds to the nearest, ties to even.
INSTRUCTION(unsigned short, float_to_half, (float value),
            "cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value))

// The value of the thread `distance` lanes before or behind in the same 32; its own where there is
// none.
template <typename Value>
ON_DEVICE Value from_lane_before(Value value, int distance) {
    return __shfl_up_sync(0xFFFFFFFFu, value, distance);
}

template <typename Value>
ON_DEVICE Value from_lane_behind(Value value, int distance) {
    return __shfl_down_sync(0xFFFFFFFFu, value, distance);
}

#endif
