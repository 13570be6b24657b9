// candle's kernels that the program launches, with candle's names and parameters.
#include <cstdint>

#include "../../../kernels/cuda/emulator/language.hpp"

namespace standin {
emulator::Kernel *candle_kernels = nullptr;
}

namespace {

/// Position in memory of element `i` of a tensor with `dims`, then `strides`; null means
/// contiguous.
size_t place(size_t i, size_t num_dims, const size_t *dims_and_strides) {
    if (!dims_and_strides) return i;
    size_t at = 0;
    for (size_t d = num_dims; d-- > 0;) {
        at += i % dims_and_strides[d] * dims_and_strides[num_dims + d];
        i /= dims_and_strides[d];
    }
    return at;
}

size_t first() { return blockIdx.x * blockDim.x + threadIdx.x; }
size_t step() { return static_cast<size_t>(gridDim.x) * blockDim.x; }

double wide(float x) { return x; }
double wide(double x) { return x; }
double wide(bf16 x) { return emulator_float(x); }
double wide(f16 x) { return emulator_float(x); }
double wide(uint8_t x) { return x; }
double wide(uint32_t x) { return x; }
double wide(int64_t x) { return static_cast<double>(x); }

template <class T>
T narrow(double x) {
    return static_cast<T>(x);
}
template <>
bf16 narrow<bf16>(double x) {
    return emulator_bf16(static_cast<float>(x));
}
template <>
f16 narrow<f16>(double x) {
    return emulator_f16(static_cast<float>(x));
}

template <class From, class To>
void cast(size_t n, size_t num_dims, const size_t *info, const From *from, To *to) {
    for (size_t i = first(); i < n; i += step())
        to[i] = narrow<To>(wide(from[place(i, num_dims, info)]));
}

template <class T>
void copy(size_t n, size_t num_dims, const size_t *info, const T *from, T *to) {
    for (size_t i = first(); i < n; i += step())
        to[i] = (from ? from : to)[place(i, num_dims, info)];
}

template <class T>
void square(size_t n, size_t num_dims, const size_t *info, const T *from, T *to) {
    for (size_t i = first(); i < n; i += step()) {
        const double x = wide((from ? from : to)[place(i, num_dims, info)]);
        to[i] = narrow<T>(x * x);
    }
}

template <class T>
void exponential(size_t n, size_t num_dims, const size_t *info, const T *from, T *to) {
    for (size_t i = first(); i < n; i += step())
        to[i] = narrow<T>(std::exp(wide((from ? from : to)[place(i, num_dims, info)])));
}

template <class T>
void copy2d(const T *from, T *to, uint32_t rows, uint32_t columns, uint32_t from_stride,
    uint32_t to_stride) {
    for (size_t i = first(); i < static_cast<size_t>(rows) * columns; i += step())
        to[i / columns * to_stride + i % columns] = from[i / columns * from_stride + i % columns];
}

template <class T>
void set(size_t n, size_t num_dims, const size_t *info, T value, T *to) {
    for (size_t i = first(); i < n; i += step()) to[place(i, num_dims, info)] = value;
}

template <class T>
void affine(
    size_t n, size_t num_dims, const size_t *info, const T *from, T *to, T factor, T summand) {
    for (size_t i = first(); i < n; i += step()) {
        const T x = from ? from[place(i, num_dims, info)] : to[i];
        to[i] = narrow<T>(wide(x) * wide(factor) + wide(summand));
    }
}

template <class T, char OPERATION>
void binary(size_t n, size_t num_dims, const size_t *info, const T *left, const T *right, T *to) {
    // Dimensions, strides of the left, strides of the right.
    const auto right_place = [=](size_t i) {
        if (!info) return i;
        size_t at = 0;
        for (size_t d = num_dims; d-- > 0;) {
            at += i % info[d] * info[2 * num_dims + d];
            i /= info[d];
        }
        return at;
    };
    for (size_t i = first(); i < n; i += step()) {
        const double a = wide(left[place(i, num_dims, info)]), b = wide(right[right_place(i)]);
        to[i] = narrow<T>(OPERATION == '+'   ? a + b
                          : OPERATION == '-' ? a - b
                          : OPERATION == '*' ? a * b
                                             : a / b);
    }
}

/// For contiguous operands. candle's dimensions and strides are those of `ids`.
template <class T>
void select(size_t n, size_t, const size_t *, const uint32_t *ids, const T *from, T *to, size_t,
    size_t rows, size_t num_ids, size_t width) {
    for (size_t i = first(); i < n; i += step()) {
        const size_t outer = i / (num_ids * width), id = ids[i / width % num_ids];
        if (id >= rows) emulator::fail("row %zu of %zu is selected", id, rows);
        to[i] = from[(outer * rows + id) * width + i % width];
    }
}

#define KNOWN(name, ...)                                                                           \
    emulator::Registered of_##name(standin::candle_kernels, #name, __VA_ARGS__);
#define OF_TYPE(T, suffix)                                                                         \
    KNOWN(ucopy_##suffix, copy<T>)                                                                 \
    KNOWN(usqr_##suffix, square<T>)                                                                \
    KNOWN(uexp_##suffix, exponential<T>)                                                           \
    KNOWN(copy2d_##suffix, copy2d<T>)                                                              \
    KNOWN(const_set_##suffix, set<T>)                                                              \
    KNOWN(affine_##suffix, affine<T>)                                                              \
    KNOWN(is_u32_##suffix, select<T>)                                                              \
    KNOWN(badd_##suffix, binary<T, '+'>)                                                           \
    KNOWN(bsub_##suffix, binary<T, '-'>)                                                           \
    KNOWN(bmul_##suffix, binary<T, '*'>)                                                           \
    KNOWN(bdiv_##suffix, binary<T, '/'>)                                                           \
    KNOWN(cast_##suffix##_f32, cast<T, float>)                                                     \
    KNOWN(cast_##suffix##_f64, cast<T, double>)                                                    \
    KNOWN(cast_##suffix##_bf16, cast<T, bf16>)                                                     \
    KNOWN(cast_##suffix##_f16, cast<T, f16>)                                                       \
    KNOWN(cast_##suffix##_u32, cast<T, uint32_t>)
OF_TYPE(float, f32)
OF_TYPE(double, f64)
OF_TYPE(bf16, bf16)
OF_TYPE(f16, f16)
OF_TYPE(uint32_t, u32)
OF_TYPE(uint8_t, u8)
OF_TYPE(int64_t, i64)

} // namespace
