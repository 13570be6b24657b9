//! Memory for panels and unfinished sums. Each thread keeps its own from one product to the next.

use std::cell::Cell;
use std::thread::LocalKey;

use crate::tensor::arena;

/// A cache line, so that panels are aligned for every vector and tile load.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Uninitialized memory, aligned to cache lines.
#[derive(Default)]
pub struct Buffer(Vec<Line>);

impl Buffer {
    /// Room for `n` elements of `T`, with arbitrary contents.
    pub fn room<T: Copy>(&mut self, n: usize) -> *mut T {
        let lines = (n * size_of::<T>()).div_ceil(size_of::<Line>());
        if lines > self.0.capacity() {
            self.0 = Vec::new(); // free first, so that both never exist at once
            arena::outside(|| self.0.reserve_exact(lines));
        }
        self.0.as_mut_ptr().cast()
    }
}

/// A thread's buffers for its part of a product.
#[derive(Default)]
pub struct ThreadBuffers {
    /// Strips of A.
    pub strips: Buffer,
    /// Panels of B, if a thread packs them alone.
    pub panels: Buffer,
    /// Unfinished sums.
    pub sums: Buffer,
    /// Whether other threads read these strips or panels. Then nothing may be written there before
    /// the product is complete.
    pub lent: bool,
    /// Strips and panels that were lent.
    aside: Vec<[Buffer; 2]>,
}

impl ThreadBuffers {
    /// Call this before writing strips and panels: lent ones move aside and stay unchanged.
    pub fn keep_lent(&mut self) {
        if std::mem::take(&mut self.lent) {
            self.aside.push([std::mem::take(&mut self.strips), std::mem::take(&mut self.panels)]);
        }
    }

    /// Call this when no other thread reads lent buffers any more.
    pub fn all_is_back(&mut self) {
        self.lent = false;
        if let Some([strips, panels]) = self.aside.drain(..).next() {
            (self.strips, self.panels) = (strips, panels);
        }
    }
}

/// Buffers that the threads of a product share.
#[derive(Default)]
pub struct SharedBuffers {
    /// Panels of B.
    pub panels: Buffer,
    /// Unfinished sums that outlast a piece of B.
    pub sums: Buffer,
    /// The bias in f32.
    pub bias: Buffer,
}

thread_local! {
    static OWN: Cell<Option<Box<ThreadBuffers>>> = const { Cell::new(None) };
    static COMMON: Cell<Option<Box<SharedBuffers>>> = const { Cell::new(None) };
}

/// Lends a thread's kept value; a nested call within `f` gets a separate one.
fn lend<T: Default, R>(
    kept: &'static LocalKey<Cell<Option<Box<T>>>>,
    f: impl FnOnce(&mut T) -> R,
) -> R {
    let mut value = kept.take().unwrap_or_default();
    let result = f(&mut value);
    kept.set(Some(value));
    result
}

/// Lends this thread's own buffers.
pub fn with_thread_buffers<R>(f: impl FnOnce(&mut ThreadBuffers) -> R) -> R {
    lend(&OWN, f)
}

/// Lends the buffers that this thread shares with the threads that help it.
pub fn with_shared_buffers<R>(f: impl FnOnce(&mut SharedBuffers) -> R) -> R {
    lend(&COMMON, f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_is_not_written_until_all_is_back() {
        let mut own = ThreadBuffers::default();
        let lent = [own.strips.room::<f32>(64), own.panels.room(64)];
        own.keep_lent();
        assert_eq!([own.strips.room::<f32>(64), own.panels.room(64)], lent, "nothing was lent");
        own.lent = true;
        own.keep_lent();
        let others = [own.strips.room::<f32>(64), own.panels.room(64)];
        assert!(others.iter().all(|other| !lent.contains(other)));
        own.lent = true;
        own.keep_lent();
        let third = own.panels.room::<f32>(64);
        assert!(!lent.contains(&third) && !others.contains(&third));
        own.all_is_back();
        assert_eq!([own.strips.room::<f32>(64), own.panels.room(64)], lent);
    }
}
