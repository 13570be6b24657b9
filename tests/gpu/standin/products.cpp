// cuBLASLt's products, and the functions of other libraries that candle needs to open a device.
#include <cublasLt.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "device.hpp"
#include "narrow.hpp"

namespace standin {

namespace {

struct Description {
    cublasOperation_t transposed_a = CUBLAS_OP_N, transposed_b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    char *bias = nullptr, *aux = nullptr;
    int64_t aux_stride = 0;
    cudaDataType_t aux_type = CUDA_R_32F;
    bool has_aux_type = false;
};

/// Column-major.
struct Matrix {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t stride;
};

template <class T>
T element(const char *at, uint64_t i) {
    T x;
    std::memcpy(&x, at + sizeof(T) * i, sizeof(T));
    return x;
}

float load(const char *at, uint64_t i, cudaDataType_t type) {
    if (type == CUDA_R_32F) return element<float>(at, i);
    return type == CUDA_R_16F ? emulator_float(element<f16>(at, i))
                              : emulator_float(element<bf16>(at, i));
}

void store(char *at, uint64_t i, cudaDataType_t type, float x) {
    if (type == CUDA_R_32F) {
        std::memcpy(at + 4 * i, &x, 4);
        return;
    }
    const uint16_t bits = type == CUDA_R_16F ? emulator_f16(x).bits : emulator_bf16(x).bits;
    std::memcpy(at + 2 * i, &bits, 2);
}

// GELU by tanh, as in cuBLASLt.
constexpr float ROOT = 0.7978845608f, CUBE = 0.044715f;

float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(ROOT * (x + CUBE * x * x * x))); }

float gelu_slope(float x) {
    const float t = std::tanh(ROOT * (x + CUBE * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * ROOT * (1.0f + 3.0f * CUBE * x * x);
}

/// The whole matrix as float, with element (row, column) at `row + column · rows`.
std::vector<float> read(const char *at, const Matrix &m, cublasOperation_t operation,
    uint64_t &rows, uint64_t &columns) {
    const bool turned = operation == CUBLAS_OP_T;
    rows = turned ? m.columns : m.rows;
    columns = turned ? m.rows : m.columns;
    std::vector<float> all(rows * columns);
    for (uint64_t c = 0; c < m.columns; c++)
        for (uint64_t r = 0; r < m.rows; r++) {
            const float x = load(at, r + c * static_cast<uint64_t>(m.stride), m.type);
            all[turned ? c + r * rows : r + c * rows] = x;
        }
    return all;
}

struct Call {
    Description description;
    Matrix a, b, c, d;
    const char *at_a, *at_b, *at_c;
    char *at_d;
    float alpha, beta;

    void run() const {
        uint64_t m, k, k2, n;
        const std::vector<float> x = read(at_a, a, description.transposed_a, m, k),
                                 y = read(at_b, b, description.transposed_b, k2, n);
        if (k != k2 || m != d.rows || n != d.columns)
            return fault("a product of matrices that do not fit");
        const auto epilogue = description.epilogue;
        const bool adds_bias = epilogue == CUBLASLT_EPILOGUE_BIAS ||
                               epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
                               epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        const bool has_gelu =
            epilogue == CUBLASLT_EPILOGUE_GELU || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS ||
            epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        const bool keeps =
            epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        const bool has_slope =
            epilogue == CUBLASLT_EPILOGUE_DGELU || epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
        const auto aux_type = description.has_aux_type ? description.aux_type : d.type;
        std::vector<float> sums(m);
        std::vector<double> of_rows(m);
        for (uint64_t column = 0; column < n; column++) {
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (uint64_t i = 0; i < k; i++) {
                const float by = y[i + column * k];
                for (uint64_t row = 0; row < m; row++) sums[row] += x[row + i * m] * by;
            }
            for (uint64_t row = 0; row < m; row++) {
                float value = alpha * sums[row];
                if (beta != 0)
                    value +=
                        beta * load(at_c, row + column * static_cast<uint64_t>(c.stride), c.type);
                if (adds_bias) value += load(description.bias, row, d.type);
                const uint64_t aux = row + column * static_cast<uint64_t>(description.aux_stride);
                if (keeps) store(description.aux, aux, aux_type, value);
                if (has_gelu) value = gelu(value);
                if (has_slope) value *= gelu_slope(load(description.aux, aux, aux_type));
                of_rows[row] += value;
                store(at_d, row + column * static_cast<uint64_t>(d.stride), d.type, value);
            }
        }
        if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD)
            for (uint64_t row = 0; row < m; row++)
                store(description.bias, row, d.type, static_cast<float>(of_rows[row]));
    }
};

template <class T>
bool take(T &to, const void *from, size_t bytes) {
    if (bytes != sizeof(T)) return false;
    std::memcpy(&to, from, bytes);
    return true;
}

bool is_known(cublasLtEpilogue_t epilogue) {
    switch (epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        return true;
    default:
        return false;
    }
}

} // namespace

} // namespace standin

using namespace standin;

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = reinterpret_cast<cublasLtHandle_t>(new int);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<int *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

const char *cublasLtGetStatusString(cublasStatus_t) {
    return "a status of the stand-in for cuBLASLt";
}

cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t *description, cublasComputeType_t compute, cudaDataType_t scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *description = reinterpret_cast<cublasLtMatmulDesc_t>(new Description);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    delete reinterpret_cast<Description *>(description);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
    cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
    auto &d = *reinterpret_cast<Description *>(description);
    int32_t number = 0;
    bool fits = true;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        fits = take(number, value, bytes);
        d.transposed_a = static_cast<cublasOperation_t>(number);
        break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
        fits = take(number, value, bytes);
        d.transposed_b = static_cast<cublasOperation_t>(number);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        fits = take(number, value, bytes);
        d.epilogue = static_cast<cublasLtEpilogue_t>(number);
        fits = fits && is_known(d.epilogue);
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        fits = take(d.bias, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        fits = take(d.aux, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        fits = take(d.aux_stride, value, bytes);
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
        fits = take(number, value, bytes);
        d.aux_type = static_cast<cudaDataType_t>(number);
        d.has_aux_type = true;
        break;
    default:
        fits = false;
    }
    return fits ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
    uint64_t rows, uint64_t columns, int64_t stride) {
    const bool known = type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F;
    if (!known || stride < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Matrix{type, rows, columns, stride});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete reinterpret_cast<Matrix *>(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new int);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete reinterpret_cast<int *>(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int wanted,
    cublasLtMatmulHeuristicResult_t results[], int *found) {
    // Two algorithms, so that there is a choice.
    *found = std::min(wanted, 2);
    for (int i = 0; i < *found; i++) {
        std::memset(&results[i], 0, sizeof results[i]);
        results[i].state = CUBLAS_STATUS_SUCCESS;
    }
    const auto &of_c = *reinterpret_cast<Matrix *>(c), &of_d = *reinterpret_cast<Matrix *>(d);
    return of_c.rows == of_d.rows && of_c.columns == of_d.columns ? CUBLAS_STATUS_SUCCESS
                                                                  : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void *alpha,
    const void *a, cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b,
    const void *beta, const void *c, cublasLtMatrixLayout_t of_c, void *d,
    cublasLtMatrixLayout_t of_d, const cublasLtMatmulAlgo_t *, void *, size_t,
    cudaStream_t stream) {
    Call call{*reinterpret_cast<Description *>(description), *reinterpret_cast<Matrix *>(of_a),
        *reinterpret_cast<Matrix *>(of_b), *reinterpret_cast<Matrix *>(of_c),
        *reinterpret_cast<Matrix *>(of_d), static_cast<const char *>(a),
        static_cast<const char *>(b), static_cast<const char *>(c), static_cast<char *>(d),
        *static_cast<const float *>(alpha), *static_cast<const float *>(beta)};
    stream_of(reinterpret_cast<CUstream>(stream)).queue(CU_GRAPH_NODE_TYPE_KERNEL, [call] {
        call.run();
    });
    return state() == CUDA_SUCCESS ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

// candle opens it with every device; nothing here uses it.

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = reinterpret_cast<cublasHandle_t>(new int);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    delete reinterpret_cast<int *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }

int curandCreateGenerator(void **generator, int) {
    *generator = new int;
    return 0;
}

int curandDestroyGenerator(void *generator) {
    delete static_cast<int *>(generator);
    return 0;
}

int curandSetStream(void *, void *) { return 0; }

int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long) { return 0; }

} // extern "C"
