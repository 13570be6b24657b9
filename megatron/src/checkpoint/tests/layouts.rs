//! Tests that any layout loads what any layout saves.

use super::*;
use crate::checkpoint::{Manifest, verify};

pub(super) fn check_loads(path: &Path, model: &[ParamSpec], layout: &Layout, context: &str) {
    let manifest = Manifest::read(path).unwrap();
    for rank in 0..layout.world_size() {
        let shards = layout.empty(model, rank);
        manifest.load(&shards).unwrap();
        for (got, expected) in shards.iter().zip(layout.full(model, rank)) {
            assert_eq!(
                elements(got),
                elements(&expected),
                "{context}, rank {rank}: {} {}",
                got.name,
                got.kind
            );
        }
    }
}

#[test]
fn what_a_random_layout_saves_any_other_random_layout_loads() {
    for seed in 0..25 {
        let mut random = Random::new(seed);
        let model = model(1 + random.below(12), 1 + random.below(2));
        let dir = tempfile::tempdir().unwrap();
        let saving = Layout::random(&mut random, model.len());
        for result in save_as(dir.path(), seed, &model, &saving) {
            result.unwrap_or_else(|error| panic!("seed {seed}, saving {saving:?}: {error}"));
        }
        let path = latest(dir.path()).unwrap().unwrap().path;
        verify(&path).unwrap();
        for _ in 0..3 {
            let loading = Layout::random(&mut random, model.len());
            check_loads(&path, &model, &loading, &format!("seed {seed}, {saving:?} → {loading:?}"));
        }
    }
}

#[test]
fn stored_values_are_converted_to_the_dtype_that_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let model = vec![spec("w", &[4, 8], Partition::Split { dim: 1, parts: 1 }, 4)];
    let mut layout = Layout { tp: 2, ..Layout::single(1) };
    save_as(dir.path(), 1, &model, &layout).into_iter().for_each(|result| result.unwrap());
    let path = latest(dir.path()).unwrap().unwrap().path;
    for dtype in [DType::BF16, DType::F64, DType::I16] {
        layout.dtype = dtype;
        // expected values are rounded by candle
        check_loads(&path, &model, &layout, dtype.as_str());
    }
}

#[test]
fn the_trainers_state_comes_back_as_it_was_given() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 12);
    let manifest = Manifest::read(&latest(dir.path()).unwrap().unwrap().path).unwrap();
    assert_eq!(
        (manifest.iteration, manifest.state),
        (12, serde_json::json!({ "consumed_samples": 96 }))
    );
}

#[test]
fn files_are_plain_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1);
    let bytes = std::fs::read(dir.path().join("iter_0000001/rank_00000.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("param/layers.0.qkv.weight/0").unwrap();
    assert_eq!(tensor.shape(), [12, 6]);
    let first = f32::from_le_bytes(tensor.data()[..4].try_into().unwrap());
    assert_eq!(first, value("layers.0.qkv.weight", StateKind::Param, 0));
}

#[test]
fn tensors_of_several_dtypes_share_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let shard = |name: &str, dtype, values: &[f32]| ShardRef {
        name: name.into(),
        kind: StateKind::Param,
        global_shape: vec![values.len()],
        partition: None,
        pieces: vec![Piece {
            offset: vec![0],
            shape: vec![values.len()],
            flat: 0..values.len(),
            local: 0,
        }],
        data: Tensor::new(values, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().into(),
    };
    let saved = [
        shard("a", DType::BF16, &[1.0, 2.0, 3.0]),
        shard("b", DType::F64, &[4.0]),
        shard("c", DType::F32, &[]),
    ];
    save(dir.path(), 1, &saved, &serde_json::Value::Null, &threads::solo()).unwrap();
    let loaded = [
        shard("a", DType::BF16, &[0.0; 3]),
        shard("b", DType::F64, &[0.0]),
        shard("c", DType::F32, &[]),
    ];
    load(&dir.path().join("iter_0000001"), &loaded).unwrap();
    assert_eq!(loaded.each_ref().map(elements), saved.each_ref().map(elements));
}

#[test]
fn halves_keep_every_bit_and_ranks_that_keep_the_high_ones_alone_round_alike() {
    let dir = tempfile::tempdir().unwrap();
    // Two ties, one of which nearest-even rounds down; the largest number; a subnormal; a value
    // that bf16 represents exactly; and zeros.
    let bits =
        [0x3f80_8000, 0x3f81_8000, 0x7f7f_ffff, 0x8000_0001, 0x4040_0000, 0, 0x8000_0000_u32];
    let values = Tensor::new(bits.map(f32::from_bits).as_slice(), &Device::Cpu).unwrap();
    let shard = |data: Elements| ShardRef {
        name: "w".into(),
        kind: StateKind::Param,
        global_shape: vec![bits.len()],
        partition: None,
        pieces: vec![Piece {
            offset: vec![0],
            shape: vec![bits.len()],
            flat: 0..bits.len(),
            local: 0,
        }],
        data,
    };
    let kept = halves(&values);
    save(dir.path(), 1, &[shard(kept.clone())], &serde_json::Value::Null, &threads::solo())
        .unwrap();
    let empty = || halves(&values.zeros_like().unwrap());
    let (whole, plain) = (empty(), Elements::from(values.zeros_like().unwrap()));
    let Elements::Halves { high, .. } = empty() else { unreachable!() };
    let rounded = Elements::Halves { high, low: None };
    let loaded = [&whole, &plain, &rounded].map(|data| shard(data.clone()));
    load(&dir.path().join("iter_0000001"), &loaded).unwrap();
    let stored =
        |data: &Elements| data.to_f32().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!([stored(&whole), stored(&plain)], [bits.to_vec(), bits.to_vec()]);
    let Elements::Halves { high, .. } = kept else { unreachable!() };
    assert_eq!(stored(&rounded), stored(&Elements::from(high.all_on_host().unwrap())));
    let lost = save(dir.path(), 2, &[shard(rounded)], &serde_json::Value::Null, &threads::solo());
    assert!(message(lost.unwrap_err()).contains("half of a tensor's values"));
}
