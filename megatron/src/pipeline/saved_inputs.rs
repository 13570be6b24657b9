//! What full recompute saves, from forward to backward: the input of every recomputed segment.
//!
//! Two settings reduce its memory, and change no bit. The inputs are cut over tp, and gathered before
//! a segment is recomputed (Megatron-LM's `--distribute-saved-activations`, DeepSpeed's
//! `partition_activations`). They are kept in host memory or in files (DeepSpeed's
//! `cpu_checkpointing`). Source: Rajbhandari et al. 2020, "ZeRO", §6.1, Pa and Pa+cpu.

use std::sync::Mutex;

use candle_core::{DType, Device, Shape, Tensor};
use kernels::tensor::device::{computes_ahead, empty};
use kernels::tensor::transfer::{Mark, mark};

use crate::comm::lock;
use crate::params::{LocalPart, Residence};
use crate::tensor_parallel::TensorParallel;
use crate::tensor_parallel::layout::Stream;
use crate::{Error, Result};

/// How a stage keeps the inputs of recomputed segments. The default: whole, where it computes.
#[derive(Default)]
pub struct SavedInputs {
    distributed: bool,
    residence: Residence,
    slots: Mutex<Slots>,
}

/// Room for inputs that are kept elsewhere. It stays from step to step.
#[derive(Default)]
struct Slots {
    /// Elements of each.
    len: usize,
    all: Vec<LocalPart>,
    free: Vec<usize>,
}

/// A segment's input while the segment is computed for the first time.
pub(super) struct Leaving {
    shape: Shape,
    elements: Tensor,
    /// The point after which the elements are there, if they are to leave a GPU.
    made: Option<Mark>,
}

/// The input of a segment that backward recomputes.
pub(super) struct SavedInput {
    shape: Shape,
    kept: Kept,
}

enum Kept {
    Here(Tensor),
    Elsewhere {
        slot: usize,
        len: usize,
        device: Device,
        /// Where the elements go on a GPU, and the point after which they may be written there.
        place: Option<(Tensor, Mark)>,
    },
}

impl SavedInputs {
    /// With `distributed`, each tp rank keeps its part of inputs that are the same on all of them.
    pub fn new(distributed: bool, residence: Residence) -> Self {
        Self { distributed, residence, slots: Mutex::default() }
    }

    /// Makes room for `count` inputs of at most `elements` elements each, and forgets all others.
    ///
    /// # Errors
    /// If there is no room.
    pub(super) fn prepare(
        &self,
        count: usize,
        elements: usize,
        tp: &TensorParallel,
        dtype: DType,
        device: &Device,
    ) -> Result<()> {
        if self.residence == Residence::Device {
            return Ok(());
        }
        let len = if self.distributed { elements.div_ceil(tp.size()) } else { elements };
        let mut slots = lock(&self.slots);
        if slots.all.len() < count || slots.len < len {
            *slots = Slots::default(); // frees the old ones first
            let parts = vec![(len, dtype); count];
            let all = LocalPart::zeros("saved activations", &parts, &self.residence, device)?;
            *slots = Slots { len, all, free: Vec::new() };
        }
        slots.free = (0..slots.all.len()).rev().collect();
        Ok(())
    }

    /// Takes what is to be kept of a segment's input. Call it before the segment is computed, and
    /// [`keep`](Self::keep) after that: a GPU then computes the segment while its input is copied.
    ///
    /// # Errors
    /// If a kernel fails.
    pub(super) fn leave(&self, x: &Stream, tp: &TensorParallel) -> Result<Leaving> {
        let elements = if self.distributed { tp.own_elements(&x.0)? } else { x.0.contiguous()? };
        let made = match self.residence {
            Residence::Device => None,
            Residence::Host | Residence::Files(_) => mark(x.0.device())?,
        };
        Ok(Leaving { shape: x.0.shape().clone(), elements, made })
    }

    /// Keeps it until [`bring`](Self::bring).
    ///
    /// # Errors
    /// If there is no free slot, or it cannot be written.
    pub(super) fn keep(&self, leaving: Leaving) -> Result<SavedInput> {
        let Leaving { shape, elements, made } = leaving;
        if self.residence == Residence::Device {
            return Ok(SavedInput { shape, kept: Kept::Here(elements) });
        }
        let (slot, part) = {
            let mut slots = lock(&self.slots);
            let none = || Error::config("internal error: more saved inputs than were announced");
            let slot = slots.free.pop().ok_or_else(none)?;
            (slot, slots.all[slot].clone())
        };
        let (flat, len) = (elements.flatten_all()?, elements.elem_count());
        match made {
            Some(made) => part.write_from_gpu(&(0..len), &flat, &made)?,
            None => part.write(&(0..len), &flat)?,
        }
        let device = elements.device().clone();
        Ok(SavedInput { shape, kept: Kept::Elsewhere { slot, len, device, place: None } })
    }

    /// Prepares to bring `input`, without waiting for it. Call it before work that a GPU can do
    /// meanwhile.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn announce(&self, input: &mut SavedInput) -> Result<()> {
        if let Kept::Elsewhere { slot, len, device, place } = &mut input.kept {
            let part = lock(&self.slots).all[*slot].clone();
            part.prefetch(0..*len);
            if computes_ahead(device) {
                let to = empty(*len, part.dtype(), device)?;
                // After the memory's last use.
                *place = mark(device)?.map(|free| (to, free));
            }
        }
        Ok(())
    }

    /// The whole input. Collective over tp if the parts are distributed.
    ///
    /// # Errors
    /// If it cannot be read, or a peer fails.
    pub(super) fn bring(&self, input: SavedInput, tp: &TensorParallel) -> Result<Stream> {
        let SavedInput { shape, kept } = input;
        let elements = match kept {
            Kept::Here(elements) => elements,
            Kept::Elsewhere { slot, len, device, place } => {
                let part = lock(&self.slots).all[slot].clone();
                let here = match place {
                    Some((to, free)) => {
                        part.copy_to_gpu(&(0..len), &to, &free)?;
                        to
                    }
                    None => part.lend(&(0..len), &device)?,
                };
                lock(&self.slots).free.push(slot);
                here
            }
        };
        match self.distributed {
            true => tp.gather_elements(&elements, &shape).map(Stream),
            false => Ok(Stream(elements.reshape(shape)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::threads;

    /// Consecutive numbers from `first` on, the same on every rank.
    fn stream(shape: (usize, usize, usize), first: usize, dtype: DType) -> Stream {
        let n = shape.0 * shape.1 * shape.2;
        let values = Tensor::arange(first as f32, (first + n) as f32, &Device::Cpu).unwrap();
        Stream(values.reshape(shape).unwrap().to_dtype(dtype).unwrap())
    }

    fn values(x: &Stream) -> Vec<f32> {
        x.0.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    fn saved(inputs: &SavedInputs, x: &Stream, tp: &TensorParallel) -> Result<SavedInput> {
        inputs.keep(inputs.leave(x, tp)?)
    }

    /// Sizes that tp divides, that it does not, and smaller than tp.
    #[test]
    fn inputs_come_back_whole_in_any_order_and_each_rank_keeps_its_part() {
        let folder = tempfile::tempdir().unwrap();
        let files = Residence::Files(folder.path().to_path_buf());
        for (distributed, residence, dtype) in [
            (false, Residence::Device, DType::F32),
            (true, Residence::Device, DType::F32),
            (false, files.clone(), DType::F32),
            (true, files.clone(), DType::F32),
            (true, files, DType::BF16),
        ] {
            let ranks = threads::run(3, |group| {
                let tp = TensorParallel::new(group, false);
                let inputs = SavedInputs::new(distributed, residence.clone());
                for shape in [(4, 1, 6), (5, 1, 7), (1, 2, 1)] {
                    let n = shape.0 * shape.1 * shape.2;
                    inputs.prepare(3, n, &tp, dtype, &Device::Cpu)?;
                    let xs = [0, 50, 100].map(|first| stream(shape, first, dtype));
                    for order in [[0, 1, 2], [2, 0, 1], [2, 1, 0]] {
                        let mut kept: Vec<_> = Vec::new();
                        for x in &xs {
                            let saved = saved(&inputs, x, &tp)?;
                            let len = match &saved.kept {
                                Kept::Here(elements) => elements.elem_count(),
                                Kept::Elsewhere { len, .. } => *len,
                            };
                            assert_eq!(len, if distributed { n.div_ceil(3) } else { n });
                            kept.push(Some(saved));
                        }
                        for which in order {
                            let mut saved = kept[which].take().unwrap();
                            inputs.announce(&mut saved)?;
                            let x = inputs.bring(saved, &tp)?;
                            assert_eq!((x.0.dims3()?, x.0.dtype()), (shape, dtype));
                            assert_eq!(values(&x), values(&xs[which]), "{shape:?} {order:?}");
                        }
                    }
                }
                Ok(())
            });
            ranks.unwrap();
        }
    }

    #[test]
    fn slots_are_reused_grow_with_the_run_and_are_free_again_after_a_failed_step() {
        let folder = tempfile::tempdir().unwrap();
        threads::run(1, |group| {
            let tp = TensorParallel::new(group, false);
            let inputs = SavedInputs::new(false, Residence::Files(folder.path().to_path_buf()));
            let x = stream((2, 1, 4), 7, DType::F32);
            let prepare = |count, elements| {
                inputs.prepare(count, elements, &tp, DType::F32, &Device::Cpu).unwrap();
                let slots = lock(&inputs.slots);
                (slots.all.len(), slots.len, slots.free.len())
            };
            assert_eq!(prepare(2, 8), (2, 8, 2));
            for _ in 0..5 {
                let kept = [saved(&inputs, &x, &tp)?, saved(&inputs, &x, &tp)?];
                let full = saved(&inputs, &x, &tp).map(drop).unwrap_err().to_string();
                assert!(full.contains("more saved inputs than were announced"), "{full}");
                for kept in kept {
                    assert_eq!(values(&inputs.bring(kept, &tp)?), values(&x));
                }
            }
            drop(saved(&inputs, &x, &tp)?);
            assert_eq!(prepare(1, 8), (2, 8, 2), "fewer inputs leave the slots as they are");
            assert_eq!(prepare(3, 8), (3, 8, 3));
            assert_eq!(prepare(1, 9), (1, 9, 1));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_cut_input_does_not_keep_the_whole_alive() {
        threads::run(2, |group| {
            let tp = TensorParallel::new(group, false);
            let x = stream((4, 1, 4), 0, DType::F32);
            let leaving = SavedInputs::new(true, Residence::Device).leave(&x, &tp)?;
            let (storage, _) = leaving.elements.storage_and_layout();
            let candle_core::Storage::Cpu(storage) = &*storage else { panic!("not on the CPU") };
            assert_eq!(storage.as_slice::<f32>()?.len(), 8);
            Ok(())
        })
        .unwrap();
    }
}
