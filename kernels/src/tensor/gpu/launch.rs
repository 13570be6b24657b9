//! Kernel arguments, and launches with the checks that both backends need.

use super::DevicePointer;
use super::backend::Gpu;
use crate::{Error, Result};

/// Storage for a part of an argument. Aligned for the most demanding type, a tensor map.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Cell([u8; 64]);

/// The arguments of a launch, in order.
///
/// The kernel's parameters decide which are needed. Their number and sizes are compared with the
/// parameters before the launch.
#[derive(Default)]
pub struct Args {
    cells: Vec<Cell>,
    /// First cell and size in bytes of each argument.
    places: Vec<(usize, usize)>,
}

impl Args {
    fn push(&mut self, bytes: &[u8]) {
        self.places.push((self.cells.len(), bytes.len()));
        for part in bytes.chunks(64) {
            let mut cell = Cell([0; 64]);
            cell.0[..part.len()].copy_from_slice(part);
            self.cells.push(cell);
        }
    }

    /// A pointer to elements.
    pub fn ptr(&mut self, pointer: DevicePointer) -> &mut Self {
        self.u64(pointer.0)
    }

    /// A pointer, null if there is none.
    pub fn optional(&mut self, pointer: Option<DevicePointer>) -> &mut Self {
        self.u64(pointer.map_or(0, |pointer| pointer.0))
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.push(&value.to_ne_bytes());
        self
    }

    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.push(&value.to_ne_bytes());
        self
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.push(&value.to_ne_bytes());
        self
    }

    /// A count or size, which is `uint64_t` in kernels.
    pub fn count(&mut self, value: usize) -> &mut Self {
        self.u64(value as u64)
    }

    pub fn f32(&mut self, value: f32) -> &mut Self {
        self.push(&value.to_ne_bytes());
        self
    }

    pub fn f64(&mut self, value: f64) -> &mut Self {
        self.push(&value.to_ne_bytes());
        self
    }

    /// A structure that the kernel takes by value.
    ///
    /// # Safety
    /// `T` has C layout (`repr(C)`), equal to the kernel's structure, and no padding.
    pub unsafe fn structure<T: Copy>(&mut self, value: &T) -> &mut Self {
        // SAFETY: a value of T is that many bytes, none of them padding by the caller's promise.
        self.push(unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>())
        });
        self
    }

    /// The arguments' addresses, as the driver takes them.
    pub(super) fn addresses(&mut self) -> Vec<*mut std::ffi::c_void> {
        let first = self.cells.as_mut_ptr();
        self.places.iter().map(|&(cell, _)| first.wrapping_add(cell).cast()).collect()
    }

    /// # Errors
    /// If the kernel has other parameters.
    pub(super) fn check(&self, name: &str, sizes: &[usize]) -> Result<()> {
        let own: Vec<usize> = self.places.iter().map(|&(_, size)| size).collect();
        if own == sizes {
            return Ok(());
        }
        Err(Error::gpu(
            name,
            format!("launched with arguments of {own:?} bytes, its parameters have {sizes:?}"),
        ))
    }
}

impl Gpu {
    /// Queues a kernel: `name` of `cuda/{file}.cu`, on `grid` blocks of `threads` threads with
    /// `shared` bytes of dynamic shared memory. Does nothing for a grid without blocks.
    ///
    /// # Errors
    /// If there is no such kernel, `args` do not match its parameters, or the launch is refused.
    pub fn launch(
        &self,
        file: &'static str,
        name: &str,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        args: impl FnOnce(&mut Args),
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let mut list = Args::default();
        args(&mut list);
        self.launch_with(file, name, grid, threads, shared, list)
    }
}

/// Number of blocks for `n` items, with `per_block` items each.
///
/// # Errors
/// If there are more than a grid can have.
pub fn blocks(op: &'static str, n: usize, per_block: usize) -> Result<u32> {
    let blocks = n.div_ceil(per_block.max(1));
    u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32).ok_or_else(|| {
        Error::shape(op, format!("{n} elements are too many for one launch on a GPU"))
    })
}

/// As [`blocks`], for the second and third dimension of a grid, which have a lower limit.
///
/// # Errors
/// If there are more than 65535.
pub fn blocks_y(op: &'static str, n: usize, per_block: usize) -> Result<u32> {
    match blocks(op, n, per_block)? {
        blocks @ 0..=65535 => Ok(blocks),
        _ => Err(Error::shape(
            op,
            format!("{n} elements are too many for a row of a launch on a GPU"),
        )),
    }
}
