#include <cmath>
#include <cstdio>
#include <cstring>
#define __device__
#define __forceinline__ inline
template <typename Value> Value __shfl_up(Value value, int, int) { return value; }
template <typename Value> Value __shfl_down(Value value, int, int) { return value; }
// device.cu comes here
int main() {
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        float value = half_to_float((unsigned short)bits);
        if (value == value && float_to_half(value) != bits) return 1;
    }
    if (float_to_half(1.0f + 0x1p-11f) != 0x3C00) return 2;
    if (add(1.0f, 0x1p-24f) != 1.0f || subtract(1.0f, 0x1p-25f) != 1.0f) return 3;
    float near = 1.0f + 0x1p-23f;
    if (multiply_add(near, 3.0f, -3.0f) != std::fma(near, 3.0f, -3.0f)) return 4;
    if (divide(1.0f, 3.0f) != 1.0f / 3.0f || root(2.0f) != std::sqrt(2.0f)) return 5;
    if (narrow(1.0 + 0x1p-24) != 1.0f || narrow(0x1p-149) != 0x1p-149f) return 8;
    if (nearest_integer(2.5) != 2 || nearest_integer(-0x1p61 - 512.0) != -0x1p61 - 512.0) return 9;
    if (widen(0x1p-149f) != 0x1p-149 || multiply(3.0f, 5.0f) != 15.0f) return 6;
    return from_lane_before(7, 1) == 7 && from_lane_behind(7, 1) == 7 ? 0 : 7;
}
