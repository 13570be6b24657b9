//! Interleaved work during tiles of any number of rows: whole strips and panels, and the last,
//! narrower ones.

use half::{bf16, f16};

use super::super::Mat;
use super::super::buffer::Buffer;
use super::super::driver::{pack_panels, pack_strips};
use super::super::kernel::{Ahead, Interleaved, Kernel, Next, Pack, Strip, To};
use super::numbers;
use crate::tensor::element::Elem;
use crate::tensor::simd::Isa;

/// Room for `n` elements in `memory`, all zeros.
fn zeros<P: Copy>(memory: &mut Buffer, n: usize) -> *mut P {
    let room = memory.room::<P>(n);
    // SAFETY: there is room for that many.
    unsafe { room.write_bytes(0, n) };
    room
}

/// Checks tiles with an inner dimension as long as the packed part, and with a longer one. `k`, the
/// tile's inner dimension, is not a multiple of its shares. `lies` lists whether rows of the
/// operand are contiguous.
fn check<E: Elem<Acc = f32>, K: Kernel<E>>(k: usize, lies: &[bool]) {
    let half = (k / 2).next_multiple_of(K::KQ);
    [k, half].into_iter().for_each(|packed| check_interleaved::<E, K>(packed, k, lies));
}

fn check_interleaved<E: Elem<Acc = f32>, K: Kernel<E>>(k: usize, tile: usize, lies: &[bool]) {
    let size = K::MR.max(K::NR) * tile;
    let [mut want, mut got, mut nothing, mut sums] = [(); 4].map(|()| Buffer::default());
    let (nothing, sums) =
        (zeros::<K::Packed>(&mut nothing, size), zeros::<f32>(&mut sums, K::MR * K::NR));
    for (is_panel, unit) in [(false, K::MR), (true, K::NR)] {
        for width in [1, unit / 2 + 2, unit] {
            for &contiguous in lies {
                let row = if contiguous { k } else { width } + 3;
                let from = numbers::<E>((k + 3) * (width + 3), 5);
                let m = if contiguous {
                    Mat(from.as_ptr(), row, 1)
                } else {
                    Mat(from.as_ptr(), 1, row)
                };
                let want = zeros::<K::Packed>(&mut want, size);
                // SAFETY: the memory has these sizes.
                unsafe {
                    if is_panel {
                        pack_panels::<E, K>(m.t(), width, k, want);
                    } else {
                        pack_strips::<E, K>(m, width, k, want);
                    }
                }
                for rows in 1..=K::MR {
                    let got = zeros::<K::Packed>(&mut got, size);
                    let pack = Pack { from: m, width, k, following: m.0, to: got, is_panel };
                    let next = Next::nothing(std::ptr::null());
                    // SAFETY: strips and panels have that many zeros, and sums MR rows of NR;
                    // packed elements have no padding.
                    let [got, want] = unsafe {
                        let (from, to) = ((std::ptr::null(), 0), To::Sums(sums, K::NR));
                        let ahead = Ahead { written: next, added: next, read: next };
                        let strip = Strip::Packed(nothing.cast_const());
                        K::enter();
                        K::tile(
                            rows,
                            tile,
                            strip,
                            nothing,
                            from,
                            to,
                            ahead,
                            Some(Interleaved::Pack(pack)),
                        );
                        K::leave();
                        let bytes = size * size_of::<K::Packed>();
                        [got, want]
                            .map(|p| std::slice::from_raw_parts(p.cast_const().cast::<u8>(), bytes))
                    };
                    let what = if is_panel { "panel" } else { "strip" };
                    assert!(
                        got == want,
                        "{:?} {what}, {width} × {k}, {contiguous}, beside {rows} rows",
                        E::DTYPE
                    );
                }
            }
        }
    }
}

#[test]
fn interleaved_packing_packs_as_packing_alone_does() {
    use super::super::{amx_split::AmxSplit, avx512::Avx512, avx512bf16::Avx512Bf16};
    let isa = Isa::supported();
    if isa >= Isa::Avx512 {
        check::<f32, Avx512>(86, &[false]);
        check::<f16, Avx512>(86, &[false]);
    }
    if isa >= Isa::Avx512Bf16 {
        check::<bf16, Avx512Bf16>(86, &[false]);
    }
    if isa >= Isa::Amx {
        check::<f32, AmxSplit>(160, &[false, true]);
        check::<f16, AmxSplit>(160, &[false, true]);
    }
}
