//! Runs cases: inputs of every dtype, as whole tensors and as views, on the GPU and in f64 on the
//! CPU.

use candle_core::{DType, Device, Tensor};
use kernels::Result;
#[cfg(feature = "emulated")]
use kernels::tensor::gpu::emulated::{self, Order};
use kernels::tensor::philox::{fill_normal, stream_id};

/// The dtypes of GPU kernels, with the relative error (L2) they may have.
const DTYPES: [(DType, f64); 3] = [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)];

/// Contents of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// In the tested dtype.
    Data,
    /// In f32 whatever the dtype: statistics, main gradients.
    Wide,
    /// u32 below a bound.
    Ids(u32),
}

/// An operand of a case: normal deviates times `scale`, or integers.
#[derive(Clone)]
pub struct Input {
    name: &'static str,
    shape: Vec<usize>,
    kind: Kind,
    scale: f64,
}

impl Input {
    /// Elements in the tested dtype.
    pub fn data(name: &'static str, shape: &[usize]) -> Self {
        Self { name, shape: shape.to_vec(), kind: Kind::Data, scale: 1.0 }
    }

    /// Elements in f32 (f64 in the reference), whatever the dtype.
    pub fn wide(name: &'static str, shape: &[usize]) -> Self {
        Self { kind: Kind::Wide, ..Self::data(name, shape) }
    }

    /// u32 below `bound`.
    pub fn ids(name: &'static str, shape: &[usize], bound: u32) -> Self {
        Self { kind: Kind::Ids(bound), ..Self::data(name, shape) }
    }

    pub fn times(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    fn dtype(&self, tested: DType) -> DType {
        match self.kind {
            Kind::Data => tested,
            Kind::Wide if tested == DType::F64 => DType::F64,
            Kind::Wide => DType::F32,
            Kind::Ids(_) => DType::U32,
        }
    }

    /// Values that the tested dtype can hold, in f64 (u32).
    fn values(&self, tested: DType) -> Tensor {
        let n = self.shape.iter().product::<usize>();
        if let Kind::Ids(bound) = self.kind {
            let hash = stream_id(self.name) as u32 | 1;
            let value = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(hash) >> 7) % bound;
            return Tensor::from_vec(
                (0..n as u32).map(value).collect(),
                self.shape.as_slice(),
                &Device::Cpu,
            )
            .unwrap();
        }
        let mut values = vec![0.0; n];
        fill_normal(&mut values, 1234, stream_id(self.name), 0, self.scale);
        let t = Tensor::from_vec(values, self.shape.as_slice(), &Device::Cpu).unwrap();
        t.to_dtype(self.dtype(tested)).unwrap().to_dtype(DType::F64).unwrap()
    }
}

/// Offset of an operand in its storage, in elements. 3 is at no multiple of 16 bytes.
const OFFSETS: [usize; 3] = [
    0,  // The storage's beginning.
    64, // At a multiple of 16 bytes.
    3,
];

/// An operand on the device, in the middle of a storage. All other elements of the storage are NaN
/// (the largest integer).
struct Placed {
    around: Tensor,
    tensor: Tensor,
    offset: usize,
}

impl Placed {
    fn new(values: &Tensor, dtype: DType, offset: usize, device: &Device) -> Self {
        let n = values.elem_count();
        let pad = |n: usize| match dtype {
            DType::U32 => Tensor::full(u32::MAX, n, &Device::Cpu).unwrap(),
            dtype => Tensor::full(f64::NAN, n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap(),
        };
        let middle = values.flatten_all().unwrap().to_dtype(dtype).unwrap();
        // The driver does not allocate zero bytes.
        let behind = if n == 0 { offset.max(1) } else { offset };
        let around =
            Tensor::cat(&[pad(offset), middle, pad(behind)], 0).unwrap().to_device(device).unwrap();
        let tensor = around.narrow(0, offset, n).unwrap().reshape(values.dims()).unwrap();
        Self { around, tensor, offset }
    }

    /// Asserts that nothing was written outside the operand.
    fn assert_only_inside(&self, what: &str) {
        if self.around.dtype() == DType::U32 {
            return;
        }
        let all = values(&self.around);
        let (before, after) = (&all[..self.offset], &all[all.len() - self.offset..]);
        assert!(
            before.iter().chain(after).all(|v| v.is_nan()),
            "{what}: written beside an operand"
        );
    }
}

fn values(t: &Tensor) -> Vec<f64> {
    t.to_device(&Device::Cpu)
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// ‖a − b‖ / ‖b‖; NaN if one is.
fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| if a == b { 0.0 } else { a - b }));
    if difference == 0.0 { 0.0 } else { difference / norm(&mut b.iter().copied()) }
}

/// Ways to run a case that must give the same bits: different orders of threads and blocks in the
/// emulator, twice on a GPU.
#[cfg(feature = "emulated")]
pub fn runs<R>(f: impl Fn(&Device) -> R) -> Vec<(String, R)> {
    in_orders(&ORDERS, f)
}

#[cfg(feature = "emulated")]
const ORDERS: [Order; 4] = [Order::Shuffled(1), Order::WarpByWarp, Order::Forward, Order::Backward];

#[cfg(feature = "emulated")]
fn in_orders<R>(orders: &[Order], f: impl Fn(&Device) -> R) -> Vec<(String, R)> {
    let run = |order| (format!("{order:?}"), emulated::run(order, || f(&Device::Cpu)));
    orders.iter().map(|&order| run(order)).collect()
}

/// As [`runs`], for operands at another offset. Aligned offsets are run in all orders; other
/// offsets only differ in how operands are loaded, so they are run in some.
#[cfg(feature = "emulated")]
fn runs_at<R>(offset: usize, f: impl Fn(&Device) -> R) -> Vec<(String, R)> {
    let orders = match offset {
        0 => 4,
        64 => 1,
        _ => 2,
    };
    in_orders(&ORDERS[..orders], f)
}

#[cfg(all(feature = "cuda", not(feature = "emulated")))]
fn runs_at<R>(_: usize, f: impl Fn(&Device) -> R) -> Vec<(String, R)> {
    runs(f)
}

#[cfg(all(feature = "cuda", not(feature = "emulated")))]
pub fn runs<R>(f: impl Fn(&Device) -> R) -> Vec<(String, R)> {
    let device = kernels::tensor::gpu::open(0)
        .expect("these tests need a GPU; without one, run them with --features emulated");
    ["once", "again"].map(|name| (name.to_string(), f(&device))).into()
}

/// Runs `f` for every dtype, on the GPU and in f64 on the CPU. Its results are new tensors or
/// inputs that it writes into.
#[track_caller]
pub fn check(case: &str, inputs: &[Input], f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>) {
    check_with(case, inputs, &DTYPES, f);
}

/// As [`check`], for these dtypes, each with the relative error it may have.
#[track_caller]
pub fn check_with(
    case: &str,
    inputs: &[Input],
    dtypes: &[(DType, f64)],
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) {
    for &(dtype, tolerance) in dtypes {
        let shapes: Vec<String> =
            inputs.iter().map(|i| format!("{} {:?}", i.name, i.shape)).collect();
        let what = format!("{case}({}) in {dtype:?}", shapes.join(", "));
        let wide: Vec<Tensor> = inputs.iter().map(|input| input.values(dtype)).collect();
        let on_cpu = |tested: DType| {
            let copies: Vec<Tensor> = inputs
                .iter()
                .zip(&wide)
                .map(|(input, t)| Placed::new(t, input.dtype(tested), 0, &Device::Cpu).tensor)
                .collect();
            f(&copies).unwrap_or_else(|e| panic!("{what}: on the CPU: {e}"))
        };
        let (want, alike) = (on_cpu(DType::F64), on_cpu(dtype));
        for offset in OFFSETS {
            let what = format!("{what}, operands {offset} elements into a storage");
            let results = runs_at(offset, |device| {
                let place = |(input, t): (&Input, &Tensor)| {
                    Placed::new(t, input.dtype(dtype), offset, device)
                };
                let placed: Vec<Placed> = inputs.iter().zip(&wide).map(place).collect();
                let tensors: Vec<Tensor> = placed.iter().map(|p| p.tensor.clone()).collect();
                let outputs = f(&tensors).unwrap_or_else(|e| panic!("{what}: {e}"));
                placed.iter().for_each(|p| p.assert_only_inside(&what));
                outputs
            });
            let mut bits: Option<(String, Vec<Vec<u64>>)> = None;
            for (run, outputs) in results {
                assert_eq!(outputs.len(), want.len());
                for (i, (got, want)) in outputs.iter().zip(&want).enumerate() {
                    assert_eq!(got.dims(), want.dims(), "{what}: shape of result {i}");
                    assert_eq!(got.dtype(), alike[i].dtype(), "{what}: dtype of result {i}");
                    let error = relative_error(&values(got), &values(want));
                    assert!(
                        error < tolerance,
                        "{what}, {run}: result {i} has error {error:.2e} of {tolerance:.0e}"
                    );
                }
                let own: Vec<Vec<u64>> = outputs
                    .iter()
                    .map(|t| values(t).iter().map(|v| v.to_bits()).collect())
                    .collect();
                match &bits {
                    None => bits = Some((run, own)),
                    Some((first, bits)) => {
                        assert!(
                            *bits == own,
                            "{what}: bits of runs \"{first}\" and \"{run}\" differ"
                        )
                    }
                }
            }
        }
    }
}
