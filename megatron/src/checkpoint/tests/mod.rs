//! Shared parts of the checkpoint tests: a seeded random source, random models and random layouts.

mod background;
mod corruption;
mod faults;
mod layouts;
mod paths;
mod reshard;
mod retention;

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::{Latest, latest, load, save};
use crate::comm::{Group, threads};
use crate::params::{
    Elements, Init, ParamSpec, Partition, Piece, ShardRef, StateKind, clip_pieces,
};
use crate::{Error, Result};

/// SplitMix64 (Steele et al. 2014): random enough for tests, the same on every machine.
pub(super) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next() % bound as u64) as usize }
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Marks local elements that were not written by a load: padding, or an error.
const UNTOUCHED: f32 = -1.0;
const KINDS: [StateKind; 3] = [StateKind::Param, StateKind::ExpAvg, StateKind::ExpAvgSq];

/// The value of an element of a logical tensor: different for every tensor, exact in f32.
fn value(name: &str, kind: StateKind, element: usize) -> f32 {
    let tensor = name.bytes().fold(kind as usize, |hash, byte| (hash * 31 + byte as usize) % 997);
    (tensor * 4096 + element) as f32
}

fn spec(name: &str, shape: &[usize], partition: Partition, padded_dim0: usize) -> ParamSpec {
    ParamSpec {
        name: name.into(),
        shape: shape.to_vec(),
        partition,
        padded_dim0,
        init: Init::Zeros,
        weight_decay: true,
        tie_group: None,
        grad_partial_over_tp: false,
    }
}

/// A model with every kind of sharding: a padded vocabulary, replicated, by row, by column, fused
/// by row and by column.
fn model(vocab: usize, num_layers: usize) -> Vec<ParamSpec> {
    let split = |dim, parts| Partition::Split { dim, parts };
    let mut specs =
        vec![spec("embedding.weight", &[vocab, 6], split(0, 1), vocab.next_multiple_of(4))];
    for layer in 0..num_layers {
        let name = |what: &str| format!("layers.{layer}.{what}");
        specs.push(spec(&name("norm.weight"), &[6], Partition::Replicated, 6));
        specs.push(spec(&name("qkv.weight"), &[12, 6], split(0, 1), 12));
        specs.push(spec(&name("proj.weight"), &[6, 8], split(1, 1), 6));
        specs.push(spec(&name("fc1.weight"), &[16, 5], split(0, 2), 16));
        specs.push(spec(&name("fused.weight"), &[3, 8, 2], split(1, 2), 3));
    }
    specs
}

/// How a model is sharded: tp varies fastest, then dp, then pp, as for the ranks of a run.
#[derive(Clone, Debug)]
struct Layout {
    tp: usize,
    dp: usize,
    /// The stage of each parameter.
    stages: Vec<usize>,
    pp: usize,
    /// For each parameter and kind, the ends of the dp ranks' shares, in 1/1024 of the flat buffer;
    /// `None` if dp ranks are copies of each other.
    zero: Option<Vec<usize>>,
    /// I16 stands for values in halves.
    dtype: DType,
}

/// The halves of f32 values.
fn halves(values: &Tensor) -> Elements {
    let empty = |dtype| Tensor::zeros(values.dims(), dtype, &Device::Cpu).unwrap();
    let (high, low) = (empty(DType::BF16), empty(DType::I16));
    kernels::ops::remainders::split(values, &high, Some(&low)).unwrap();
    Elements::Halves { high: high.into(), low: Some(low.into()) }
}

impl Layout {
    fn single(num_params: usize) -> Self {
        Self { tp: 1, dp: 1, pp: 1, stages: vec![0; num_params], zero: None, dtype: DType::F32 }
    }

    fn random(random: &mut Random, num_params: usize) -> Self {
        let (tp, dp, pp) = (random.pick(&[1, 2, 4]), 1 + random.below(3), 1 + random.below(2));
        let mut ends: Vec<usize> = (1..dp).map(|_| random.below(1025)).collect();
        ends.push(1024);
        ends.sort_unstable();
        let stages = (0..num_params).map(|_| random.below(pp)).collect();
        let (zero, dtype) =
            ((random.below(2) == 1).then_some(ends), random.pick(&[DType::F32, DType::I16]));
        Self { tp, dp, pp, stages, zero, dtype }
    }

    fn world_size(&self) -> usize {
        self.tp * self.dp * self.pp
    }

    /// A rank's shards over one buffer per kind, with elements from `fill(name, kind, pieces, local
    /// elements)`: all elements that it holds, or only those that it owns, so that every logical
    /// element is in one rank's shards.
    fn shards(
        &self,
        model: &[ParamSpec],
        rank: usize,
        owned: bool,
        fill: impl Fn(&str, StateKind, &[usize], &[Piece], &mut [f32]),
    ) -> Vec<ShardRef> {
        let (tp_rank, dp_rank, stage) =
            (rank % self.tp, rank / self.tp % self.dp, rank / self.tp / self.dp);
        let mine: Vec<_> = model
            .iter()
            .zip(&self.stages)
            .filter(|&(_, &s)| s == stage)
            .map(|(spec, _)| spec)
            .collect();
        let sizes: Vec<usize> =
            mine.iter().map(|spec| spec.local_shape(self.tp).iter().product()).collect();
        let len: usize = sizes.iter().sum();
        let range = match &self.zero {
            Some(ends) => {
                let end = |i: usize| ends[i] * len / 1024;
                if dp_rank == 0 { 0..end(0) } else { end(dp_rank - 1)..end(dp_rank) }
            }
            None => 0..len,
        };
        let mut shards = Vec::new();
        for kind in KINDS {
            let mut values = vec![UNTOUCHED; range.len()];
            let mut shares = Vec::new();
            let mut at = 0;
            for (spec, size) in mine.iter().zip(&sizes) {
                let mut pieces = spec.pieces(tp_rank, self.tp);
                pieces.iter_mut().for_each(|piece| piece.local += at);
                let pieces = clip_pieces(&pieces, range.clone());
                fill(&spec.name, kind, &spec.shape, &pieces, &mut values);
                at += size;
                let copy = (self.zero.is_none() && dp_rank > 0)
                    || (spec.partition == Partition::Replicated && tp_rank > 0);
                if !(owned && copy) {
                    shares.push((spec, pieces));
                }
            }
            let data = Tensor::from_vec(values, range.len(), &Device::Cpu).unwrap();
            let data = if self.dtype == DType::I16 {
                halves(&data)
            } else {
                data.to_dtype(self.dtype).unwrap().into()
            };
            shards.extend(shares.into_iter().map(|(spec, pieces)| ShardRef {
                name: spec.name.clone(),
                kind,
                global_shape: spec.shape.clone(),
                partition: None,
                pieces,
                data: data.clone(),
            }));
        }
        shards
    }

    /// The shards that a rank saves: the right values, with padding untouched.
    fn owned(&self, model: &[ParamSpec], rank: usize) -> Vec<ShardRef> {
        self.shards(model, rank, true, fill_right)
    }

    /// The shards that a rank loads into.
    fn empty(&self, model: &[ParamSpec], rank: usize) -> Vec<ShardRef> {
        self.shards(model, rank, false, |_, _, _, _, _| {})
    }

    /// The expected contents of `empty` after loading.
    fn full(&self, model: &[ParamSpec], rank: usize) -> Vec<ShardRef> {
        self.shards(model, rank, false, fill_right)
    }
}

/// Writes the right value to every element that `pieces` describe.
fn fill_right(name: &str, kind: StateKind, shape: &[usize], pieces: &[Piece], out: &mut [f32]) {
    for piece in pieces {
        for (flat, local) in piece.flat.clone().zip(piece.local_range()) {
            let (mut rest, mut element, mut stride) = (flat, 0, 1);
            for d in (0..shape.len()).rev() {
                element += (piece.offset[d] + rest % piece.shape[d]) * stride;
                rest /= piece.shape[d];
                stride *= shape[d];
            }
            out[local] = value(name, kind, element);
        }
    }
}

fn elements(shard: &ShardRef) -> Vec<f32> {
    shard.data.to_f32().unwrap()
}

/// Calls `f` on every rank of a world of threads; returns the results in rank order.
fn on_ranks<T: Send>(size: usize, f: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    threads::run(size, |world| Ok(f(&world))).unwrap()
}

fn save_as(dir: &Path, iteration: u64, model: &[ParamSpec], layout: &Layout) -> Vec<Result<()>> {
    on_ranks(layout.world_size(), |world| {
        let state = serde_json::json!({ "consumed_samples": iteration * 8 });
        save(dir, iteration, &layout.owned(model, world.rank()), &state, world)
    })
}

/// Saves one model with one rank: the checkpoint that most tests damage.
fn save_small(dir: &Path, iteration: u64) -> Vec<ParamSpec> {
    let model = model(7, 1);
    for result in save_as(dir, iteration, &model, &Layout::single(model.len())) {
        result.unwrap();
    }
    model
}

/// Loads a checkpoint with one rank and returns whether every element is right.
fn load_small(path: &Path, model: &[ParamSpec]) -> Result<bool> {
    let layout = Layout::single(model.len());
    let shards = layout.empty(model, 0);
    load(path, &shards)?;
    Ok(shards
        .iter()
        .zip(layout.full(model, 0))
        .all(|(got, expected)| elements(got) == elements(&expected)))
}

/// The names in a folder, sorted.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn latest_iteration(dir: &Path) -> Option<u64> {
    latest(dir).unwrap().map(|Latest { iteration, .. }| iteration)
}

fn message(error: Error) -> String {
    error.to_string()
}
