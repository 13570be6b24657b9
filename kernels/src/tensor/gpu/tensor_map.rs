//! Tensor maps: descriptions of tensors from which Hopper kernels copy boxes
//! (`cuda/include/hopper.cuh`).

use candle_core::DType;

use super::DevicePointer;
use crate::{Error, Result};

/// A kernel's `TensorMap`, passed by value.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct TensorMap([u64; 16]);

/// Elements of a box's first dimension: the 128 bytes within which swizzling permutes 16-byte
/// pieces.
const COLUMNS: u32 = 64;

/// A tensor of 16-bit elements in four dimensions, as `cuTensorMapEncodeTiled` describes it: the
/// first dimension is contiguous, and each stride is a multiple of the one before. Boxes have 64
/// elements of the first dimension and `rows` of the last.
pub struct Boxes {
    pub base: DevicePointer,
    pub dtype: DType,
    /// Number of elements, contiguous dimension first.
    pub dims: [usize; 4],
    /// Strides of the second to fourth dimension, in bytes.
    pub strides: [usize; 3],
    pub rows: u32,
}

impl Boxes {
    /// # Errors
    /// If alignments or sizes do not suit copies of boxes.
    pub fn map(&self, op: &'static str) -> Result<TensorMap> {
        let fits = self.base.address().is_multiple_of(16)
            && self.strides.iter().all(|stride| stride.is_multiple_of(16) && *stride < 1 << 40)
            && self.dims.iter().all(|&dim| dim > 0 && u32::try_from(dim).is_ok())
            && (1..=256).contains(&self.rows);
        if !fits {
            let Self { base, dims, strides, rows, .. } = self;
            let message = format!(
                "no boxes of {COLUMNS} × {rows} of {dims:?} with strides of {strides:?} bytes at {base:?}"
            );
            return Err(Error::gpu(op, message));
        }
        self.encode(op)
    }

    #[cfg(feature = "cuda")]
    fn encode(&self, op: &'static str) -> Result<TensorMap> {
        use candle_core::cuda_backend::cudarc::driver::sys;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (dims, strides) =
            (self.dims.map(|dim| dim as u64), self.strides.map(|stride| stride as u64));
        let dtype = match self.dtype {
            DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            dtype => return Err(Error::DType { op, dtype }),
        };
        // SAFETY: the arrays have the four, three, four and four numbers that four dimensions need;
        // the address is not dereferenced here.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                4,
                self.base.address() as *mut std::ffi::c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                [COLUMNS, 1, 1, self.rows].as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        result.result().map_err(|e| Error::gpu(op, format!("cuTensorMapEncodeTiled: {e}")))?;
        Ok(TensorMap(map.opaque))
    }

    /// `EmulatedMap` of `cuda/include/hopper_emulated.cuh`.
    #[cfg(not(feature = "cuda"))]
    fn encode(&self, op: &'static str) -> Result<TensorMap> {
        if !matches!(self.dtype, DType::BF16 | DType::F16) {
            return Err(Error::DType { op, dtype: self.dtype });
        }
        let pair = |low: u64, high: u64| low | high << 32;
        let [d0, d1, d2, d3] = self.dims.map(|dim| dim as u64);
        let [s1, s2, s3] = self.strides.map(|stride| stride as u64);
        let mut map = [0; 16];
        let fields = [
            self.base.address(),
            pair(d0, d1),
            pair(d2, d3),
            pair(COLUMNS.into(), 1),
            pair(1, self.rows.into()),
            2,
            s1,
            s2,
            s3,
        ];
        map[..fields.len()].copy_from_slice(&fields);
        Ok(TensorMap(map))
    }
}
