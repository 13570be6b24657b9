//! The way of a parameter of a small model: from the whole tensor to the files of a checkpoint that
//! ranks have saved.

use std::fs;
use std::ops::Range;
use std::path::Path;

use candle_core::Device;
use megatron::checkpoint::{Chunk, Manifest};
use megatron::comm::threads;
use megatron::config::{ModelConfig, ParallelConfig, RunConfig, TrainingConfig};
use megatron::data::SampleSource;
use megatron::params::{
    BucketLayout, BucketLimit, ParamsBuilder, PlacedParam, Placement, Replica, StateKind,
};
use megatron::train::{Ends, ModelBuilder, Sources, Trainer};
use models::Gpt;

use crate::pictures::svg::{Anchor, Box, Colour, HEADING, Svg, TEXT};

const NAME: &str = "decoder.layers.1.mlp.linear_fc1.weight";
const TP: usize = 2;
const DP: usize = 2;
const MARGIN: f64 = 12.0;
/// Length of a bucket.
const BUCKET: f64 = 640.0;
const ROW: f64 = 26.0;

/// Samples of zeros.
struct Zeros(usize);

impl SampleSource for Zeros {
    fn seq_length(&self) -> usize {
        self.0
    }

    fn num_samples(&self) -> u64 {
        8
    }
}

fn run() -> RunConfig {
    RunConfig {
        model: ModelConfig {
            num_layers: 2,
            hidden_size: 16,
            ffn_hidden_size: 64,
            num_attention_heads: 2,
            num_query_groups: 2,
            head_dim: 8,
            seq_length: 8,
            max_position_embeddings: 8,
            vocab_size: 64,
            ..Default::default()
        },
        parallel: ParallelConfig {
            tensor_model_parallel_size: TP,
            data_parallel_size: DP,
            zero_stage: 1,
            bucket_size: 1700,
            ..Default::default()
        },
        training: TrainingConfig { global_batch_size: DP, ..Default::default() },
        ..Default::default()
    }
}

/// Where the run's parameters lie on every rank.
fn layout(run: &RunConfig) -> BucketLayout {
    let mut params = ParamsBuilder::default();
    let ends = Ends { first: true, last: true };
    let model = Gpt::outline_of(run);
    model.chunk(ends, 0..run.model.num_layers, &mut params).unwrap();
    params.place(BucketLimit::Elements(run.parallel.bucket_size), DP, TP)
}

/// Elements of a file that hold a part of the parameter.
struct Stored {
    rank: usize,
    chunk: Chunk,
    /// Of the file.
    bytes: Range<u64>,
}

/// Has the run's ranks save a checkpoint, and looks up where the parameter is in it.
fn stored(run: &RunConfig) -> Vec<Stored> {
    let folder = tempfile::tempdir().unwrap();
    let sources = Sources::of(Zeros(run.model.seq_length));
    let saved = threads::run(run.parallel.world_size(), |world| {
        let model = Gpt::of(run, &Device::Cpu)?;
        Trainer::new(run, &model, world, &sources, &Device::Cpu)?.save(folder.path())
    });
    let path = saved.unwrap().remove(0);
    let manifest = Manifest::read(&path).unwrap();
    let of_name = |tensor: &&megatron::checkpoint::TensorEntry| {
        tensor.name == NAME && tensor.kind == StateKind::Param
    };
    let tensor = manifest.tensors.iter().find(of_name).unwrap();
    let rank_of = |file: &str| {
        file.trim_start_matches("rank_").trim_end_matches(".safetensors").parse().unwrap()
    };
    let mut stored: Vec<Stored> = tensor
        .chunks
        .iter()
        .map(|chunk| Stored {
            rank: rank_of(&chunk.file),
            chunk: chunk.clone(),
            bytes: bytes(&path.join(&chunk.file), chunk),
        })
        .collect();
    stored.sort_by_key(|stored| stored.rank);
    stored
}

/// Where a chunk of f32 lies in its safetensors file.
fn bytes(file: &Path, chunk: &Chunk) -> Range<u64> {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let header: serde_json::Value =
        serde_json::from_slice(&bytes[8..8 + usize::try_from(length).unwrap()]).unwrap();
    let of_tensor = header[&chunk.key]["data_offsets"][0].as_u64().unwrap();
    let start = 8 + length + of_tensor + 4 * chunk.start as u64;
    start..start + 4 * chunk.flat.len() as u64
}

/// The colour of what tp rank `tp` has, and dp rank `dp` of it.
fn colour(tp: usize, dp: usize) -> Colour {
    [Colour::SKY, Colour::ORANGE][tp].lighter(dp, DP)
}

/// A range as `0–511`.
fn text(range: &Range<usize>) -> String {
    format!("{}–{}", range.start, range.end - 1)
}

pub fn picture() -> String {
    let run = run();
    let layout = layout(&run);
    let param = layout.params.iter().find(|param| param.spec.name == NAME).unwrap();
    let stored = stored(&run);
    let title = "The way of a parameter into a checkpoint: tp 2 · dp 2 with ZeRO-1";
    let words = stored.iter().map(|Stored { rank, chunk, bytes }| {
        format!("Rank {rank} writes bytes {bytes:?} of {}.", chunk.file)
    });
    let mut svg = Svg::new(title, &format!("{NAME}. {}", words.collect::<Vec<_>>().join(" ")));
    svg.heading((MARGIN, MARGIN + HEADING), title);
    svg.label((MARGIN, MARGIN + HEADING + 22.0), NAME);
    let y = cut(&mut svg, MARGIN + HEADING + 50.0, param);
    let y = bucket(&mut svg, y + 26.0, &layout, param);
    let y = shards(&mut svg, y + 26.0, &layout, param);
    let y = files(&mut svg, y + 26.0, &layout, param, &stored);
    svg.finish(BUCKET + 2.0 * MARGIN, y + MARGIN)
}

/// The whole tensor, cut over tp; returns where it ends, as the following do.
fn cut(svg: &mut Svg, y: f64, param: &PlacedParam) -> f64 {
    let spec = &param.spec;
    let shape = &spec.shape;
    svg.label((MARGIN, y), &format!("1. The tensor {shape:?}, cut over tp"));
    let (top, w, h) = (y + 10.0, 150.0, 40.0);
    for tp in 0..TP {
        for piece in spec.pieces(tp, TP) {
            let rows = piece.offset[0]..piece.offset[0] + piece.shape[0];
            let from = top + h * TP as f64 * rows.start as f64 / shape[0] as f64;
            let height = h * TP as f64 * rows.len() as f64 / shape[0] as f64;
            svg.cell(Box(MARGIN, from, w, height), colour(tp, 0), &format!("rows {}", text(&rows)));
            let says = format!(
                "tp {tp}: {:?}, {} elements",
                spec.local_shape(TP),
                piece.shape.iter().product::<usize>()
            );
            svg.label((MARGIN + w + 12.0, from + height / 2.0 + TEXT * 0.35), &says);
        }
    }
    top + h * TP as f64
}

/// Pixels from the start of the bucket with so many elements.
fn at(elements: usize, len: usize) -> f64 {
    BUCKET * elements as f64 / len as f64
}

/// The bucket of a tp rank, with the parameter's place.
fn bucket(svg: &mut Svg, y: f64, layout: &BucketLayout, param: &PlacedParam) -> f64 {
    let (bucket, count) = (&layout.buckets[param.bucket], layout.buckets.len());
    let says = format!(
        "2. Its place on a rank of tp 0: elements {1} of {2} in bucket {0} of {count} (white: padding)",
        param.bucket,
        text(&(param.offset..param.offset + param.numel)),
        bucket.len
    );
    svg.label((MARGIN, y), &says);
    let top = y + 10.0;
    svg.rect(Box(MARGIN, top, BUCKET, ROW), Colour::WHITE);
    for other in layout.params.iter().filter(|other| other.bucket == param.bucket) {
        let is_it = other.spec.name == NAME;
        let name = other.spec.name.rsplit("layers.").next().unwrap_or_default();
        let short = name.split_once('.').map_or(name, |(_, rest)| rest);
        let short = short.rsplit_once('.').map_or(short, |(rest, _)| rest);
        let place =
            Box(MARGIN + at(other.offset, bucket.len), top, at(other.numel, bucket.len), ROW);
        svg.cell(place, if is_it { colour(0, 0) } else { Colour::PALE }, short);
    }
    top + ROW
}

/// The same bucket cut over dp.
fn shards(svg: &mut Svg, y: f64, layout: &BucketLayout, param: &PlacedParam) -> f64 {
    let len = layout.buckets[param.bucket].len;
    svg.label((MARGIN, y), "3. ZeRO-1 cuts the bucket over dp: each rank updates its part");
    let top = y + 10.0;
    for dp in 0..DP {
        let part = Replica::new(dp, DP, 1).range(len, Placement::Sharded);
        let place = Box(MARGIN + at(part.start, len), top, at(part.len(), len), ROW);
        svg.rect(place, Colour::PALE);
        let held = param.offset.max(part.start)..(param.offset + param.numel).min(part.end);
        if !held.is_empty() {
            let place = Box(MARGIN + at(held.start, len), top, at(held.len(), len), ROW);
            svg.cell(place, colour(0, dp), &text(&held));
        }
        let middle = MARGIN + at(part.start, len) + at(part.len(), len) / 2.0;
        let says = format!("dp {dp}: elements {}", text(&part));
        svg.text((middle, top + ROW + 16.0), TEXT, Anchor::Middle, Colour::INK, &says);
    }
    top + ROW + 16.0
}

/// What each rank writes.
fn files(
    svg: &mut Svg,
    y: f64,
    layout: &BucketLayout,
    param: &PlacedParam,
    stored: &[Stored],
) -> f64 {
    let says = "4. Each rank writes its part into its own file; the manifest lists all parts";
    svg.label((MARGIN, y), says);
    let columns = [24.0, 66.0, 146.0, 330.0, 450.0, 540.0].map(|x| MARGIN + x);
    let header = ["rank", "tp, dp", "file", "bytes of the file", "box: rows", "its elements"];
    let line = |svg: &mut Svg, y: f64, cells: &[String]| {
        columns.iter().zip(cells).for_each(|(x, cell)| svg.label((*x, y), cell));
    };
    line(svg, y + 24.0, &header.map(str::to_string));
    let mut y = y + 30.0;
    for Stored { rank, chunk, bytes } in stored {
        let (tp, dp) = (rank % TP, rank / TP);
        // What is stored is what ZeRO-1 gives the rank.
        let part =
            Replica::new(dp, DP, 1).range(layout.buckets[param.bucket].len, Placement::Sharded);
        let held = param.offset.max(part.start)..(param.offset + param.numel).min(part.end);
        assert_eq!(chunk.flat, held.start - param.offset..held.end - param.offset);
        svg.rect(Box(MARGIN, y, 14.0, 14.0), colour(tp, dp));
        let rows = chunk.offset[0]..chunk.offset[0] + chunk.shape[0];
        let cells = [
            rank.to_string(),
            format!("tp {tp}, dp {dp}"),
            chunk.file.clone(),
            format!("{}–{}", bytes.start, bytes.end - 1),
            text(&rows),
            text(&chunk.flat),
        ];
        line(svg, y + 11.5, &cells);
        y += 20.0;
    }
    y
}
