//! Collectives: over messages, over windows of shared memory, and, for large tensors, by direct
//! access to the other ranks' memory. All give the same bits.

mod direct;
mod messages;
mod rounds;
mod windows;

use std::ops::Range;

use candle_core::Tensor;

use self::rounds::Rounds;
use super::ReduceOp;
use super::group::Core;
use super::message::{Call, Payload};
use crate::Result;

/// Defines each operation by the function of the same name over the group's windows, or over
/// messages if there are no windows.
macro_rules! either {
    ($($name:ident($($arg:ident: $t:ty),*) -> $r:ty;)*) => {$(
        pub(crate) fn $name(core: &Core, call: Call, $($arg: $t),*) -> Result<$r> {
            match Rounds::begin(core, call) {
                Some(rounds) => windows::$name(rounds, $($arg),*),
                None => messages::$name(core, call, $($arg),*),
            }
        }
    )*};
}

either! {
    all_reduce(t: &Tensor, op: ReduceOp) -> ();
    all_gather(input: &Tensor, output: &Tensor) -> ();
    reduce_scatter(input: &Tensor, output: &Tensor, op: ReduceOp) -> ();
    broadcast(t: &Tensor, root: usize) -> ();
    reduce(t: &Tensor, root: usize, op: ReduceOp) -> ();
    gather(input: &Tensor, output: Option<&Tensor>, root: usize) -> ();
    scatter(input: Option<&Tensor>, output: &Tensor, root: usize) -> ();
    all_to_all(input: &Tensor, output: &Tensor) -> ();
    barrier() -> ();
    all_gather_bytes(mine: Payload) -> Vec<Vec<u8>>;
}

/// Splits `len` bytes into ranges of at most `step` bytes. Gives one empty range for 0 bytes,
/// because ranks must meet in that case, too.
fn pieces(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..len.div_ceil(step).max(1)).map(move |i| i * step..((i + 1) * step).min(len))
}

/// Byte range of the slice of `len` bytes that rank `i` of `n` combines, in whole elements of
/// `width` bytes.
fn slice(len: usize, width: usize, i: usize, n: usize) -> Range<usize> {
    let count = len / width;
    count * i / n * width..count * (i + 1) / n * width
}
