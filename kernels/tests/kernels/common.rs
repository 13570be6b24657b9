//! Shared by the tests of all kernels: inputs, candle's autograd as the oracle, comparison, thread
//! pools.

use candle_core::{DType, Device, Tensor, Var};
use kernels::tensor::philox::{fill_normal, stream_id};

/// The dtypes of every kernel, with the relative error they may have against an f64 reference.
pub const DTYPES: [(DType, f64); 2] = [(DType::F64, 1e-11), (DType::F32, 2e-5)];

/// Standard normals, in f64 but exact in f32; `name` decides the values.
pub fn randn(name: &str, shape: &[usize]) -> Tensor {
    let mut values = vec![0.0; shape.iter().product()];
    fill_normal(&mut values, 1234, stream_id(name), 0, 1.0);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()
}

/// Integers below `bound`.
pub fn ids(name: &str, shape: &[usize], bound: u32) -> Tensor {
    let n = shape.iter().product::<usize>();
    let hash = stream_id(name) as u32 | 1;
    let values: Vec<u32> = (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(hash) >> 7) % bound)
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

pub fn cast(t: &Tensor, dtype: DType) -> Tensor {
    t.to_dtype(dtype).unwrap()
}

pub fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts that `got` is `want` up to `tolerance` relative to the largest value.
#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), want.dims(), "{what}: shape");
    let (got_dtype, got, want) = (got.dtype(), values(got), values(want));
    let scale = want.iter().fold(1e-30, |m: f64, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!((g - w).abs() <= tolerance * scale, "{what} ({got_dtype:?})[{i}] is {g}, want {w}");
    }
}

/// The bits of a tensor.
pub fn bits(t: &Tensor) -> Vec<u64> {
    values(t).iter().map(|v| v.to_bits()).collect()
}

/// The value of `f`, and the gradients of Σ f·`dy` by candle's autograd, in f64.
pub fn oracle(
    inputs: &[&Tensor],
    dy: &Tensor,
    f: impl Fn(&[Tensor]) -> Tensor,
) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
    let y = f(&vars.iter().map(|v| v.as_tensor().clone()).collect::<Vec<_>>());
    let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let grads = vars.iter().map(|v| grads.get(v).unwrap().clone()).collect();
    (y.detach(), grads)
}

/// Runs `f` on one thread and on two (and three), and asserts that it returns the same bits.
#[track_caller]
pub fn assert_same_on_any_threads(f: impl Fn() -> Vec<Tensor> + Sync) {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| f().iter().map(bits).collect::<Vec<_>>())
    };
    let one = run(1);
    for threads in [2, 3] {
        assert!(one == run(threads), "results differ between 1 and {threads} threads");
    }
}

/// GELU by candle's differentiable operations: the backward of candle's own `gelu` has constants of
/// six digits.
pub fn tanh_gelu(x: &Tensor) -> Tensor {
    let cubic = x.sqr().unwrap().affine(0.044715, 1.0).unwrap().mul(x).unwrap();
    let tanh = (cubic * (2.0 / std::f64::consts::PI).sqrt()).unwrap().tanh().unwrap();
    tanh.affine(0.5, 0.5).unwrap().mul(x).unwrap()
}
