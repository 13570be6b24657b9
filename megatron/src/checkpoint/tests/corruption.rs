//! Files are untrusted: errors name the damage, and no content makes a reader panic.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::*;
use crate::checkpoint::{Manifest, verify};

struct Saved {
    _dir: tempfile::TempDir,
    path: PathBuf,
    model: Vec<ParamSpec>,
}

impl Saved {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = save_small(dir.path(), 10);
        Self { path: dir.path().join("iter_0000010"), _dir: dir, model }
    }

    fn shard(&self) -> PathBuf {
        self.path.join("rank_00000.safetensors")
    }

    fn manifest(&self) -> PathBuf {
        self.path.join("manifest.json")
    }

    /// The error messages of all functions that read the checkpoint; all must fail.
    fn refusals(&self) -> [String; 2] {
        [
            message(load_small(&self.path, &self.model).unwrap_err()),
            message(verify(&self.path).unwrap_err()),
        ]
    }

    fn check_refused(&self, parts: &[&str]) {
        for message in self.refusals() {
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    /// Rewrites the manifest's JSON with a matching checksum.
    fn edit(&self, edit: impl FnOnce(&mut Value)) {
        let mut json: Value = serde_json::from_slice(&fs::read(self.manifest()).unwrap()).unwrap();
        edit(&mut json);
        let object = json.as_object_mut().unwrap();
        object.remove("manifest_crc32c");
        self.write_body(&serde_json::to_vec(&json).unwrap()[1..]);
    }

    /// Writes the manifest's part after the checksum.
    fn write_body(&self, body: &[u8]) {
        let first = format!("{{\"manifest_crc32c\":\"{:08x}\",\n", crc32c::crc32c(body));
        fs::write(self.manifest(), [first.as_bytes(), body].concat()).unwrap();
    }
}

#[test]
fn an_edited_manifest_with_a_fitting_checksum_is_read() {
    let saved = Saved::new();
    saved.edit(|json| json["state"] = "mine".into());
    assert_eq!(Manifest::read(&saved.path).unwrap().state, "mine");
    assert!(load_small(&saved.path, &saved.model).unwrap());
}

#[test]
fn a_missing_file_is_named() {
    let saved = Saved::new();
    fs::remove_file(saved.shard()).unwrap();
    saved.check_refused(&["rank_00000.safetensors", "is missing; use another checkpoint"]);
}

#[test]
fn others_beside_a_damaged_one_are_named() {
    let saved = Saved::new();
    let dir = saved.path.parent().unwrap();
    for iteration in [9, 8, 7] {
        save_small(dir, iteration);
    }
    fs::remove_file(saved.shard()).unwrap();
    let message = Manifest::read(&saved.path).unwrap_err().to_string();
    let beside = |iteration| dir.join(format!("iter_000000{iteration}")).display().to_string();
    assert!(message.ends_with(&format!("for example {} or {}", beside(9), beside(8))), "{message}");
}

#[test]
fn a_missing_manifest_is_named() {
    let saved = Saved::new();
    fs::remove_file(saved.manifest()).unwrap();
    saved.check_refused(&["manifest.json"]);
}

#[test]
fn a_truncated_file_is_named_with_both_sizes() {
    let saved = Saved::new();
    let bytes = fs::read(saved.shard()).unwrap();
    fs::write(saved.shard(), &bytes[..bytes.len() - 1]).unwrap();
    let (has, of) = (format!("{} bytes", bytes.len() - 1), format!("of {}", bytes.len()));
    saved.check_refused(&["rank_00000.safetensors", "truncated", &has, &of]);
}

#[test]
fn a_flipped_bit_of_data_is_named_with_file_tensor_and_checksums() {
    let saved = Saved::new();
    let mut bytes = fs::read(saved.shard()).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    fs::write(saved.shard(), bytes).unwrap();
    saved.check_refused(&[
        "rank_00000.safetensors",
        "tensor \"",
        "checksum",
        "the manifest records",
    ]);
}

#[test]
fn no_flipped_bit_of_a_file_goes_unnoticed() {
    let saved = Saved::new();
    let mut random = Random::new(3);
    let bytes = fs::read(saved.shard()).unwrap();
    for _ in 0..400 {
        let mut damaged = bytes.clone();
        let at = random.below(bytes.len());
        damaged[at] ^= 1 << random.below(8);
        fs::write(saved.shard(), &damaged).unwrap();
        // Either an error, or (in a header's metadata) still the right values.
        assert!(load_small(&saved.path, &saved.model).unwrap_or(true), "a flip in byte {at}");
    }
}

#[test]
fn no_flipped_bit_of_a_manifest_goes_unnoticed() {
    let saved = Saved::new();
    let mut random = Random::new(4);
    let bytes = fs::read(saved.manifest()).unwrap();
    for _ in 0..400 {
        let mut damaged = bytes.clone();
        let at = random.below(bytes.len());
        let bit = 1 << random.below(8);
        damaged[at] ^= bit;
        fs::write(saved.manifest(), &damaged).unwrap();
        // Flips the case of a hexadecimal digit of the checksum, which is the same value.
        let same_digit = bit == 0x20 && at < 30;
        assert!(
            same_digit || Manifest::read(&saved.path).is_err(),
            "a flip of {bit:#x} in byte {at}"
        );
    }
}

#[test]
fn files_outside_the_checkpoints_folder_are_refused() {
    for name in ["../rank_00000.safetensors", "/etc/passwd", "sub/file", "..", ".", "", "./x", "x/"]
    {
        let saved = Saved::new();
        saved.edit(|json| json["files"][name] = 1.into());
        saved.check_refused(&[&format!("{name:?}"), "not a file in the checkpoint's own folder"]);
    }
}

#[test]
fn a_newer_format_is_refused_with_both_versions() {
    let saved = Saved::new();
    saved.edit(|json| {
        json["format_version"] = 2.into();
        json["tensors"] = "something new".into();
    });
    saved.check_refused(&["format version 2", "this program reads 1"]);
}

#[test]
fn manifests_that_contradict_themselves_are_refused() {
    let first = "/tensors/0/chunks/0";
    let huge = usize::MAX;
    for (pointer, value, why) in [
        ("/shape", serde_json::json!([8, 6]), "nothing holds 6 of its 48 elements"),
        ("/shape", serde_json::json!([huge, huge]), "no machine holds"),
        ("/shape", serde_json::json!([42]), "a different number of dimensions"),
        ("/dtype", serde_json::json!("int4"), "is not a manifest"),
        ("/dtype", serde_json::json!("f64"), "the manifest says f64"),
        ("/name", serde_json::json!("layers.0.norm.weight"), "listed twice"),
        ("/chunks/0/flat", serde_json::json!({ "start": 9, "end": 3 }), "9..3"),
        ("/chunks/0/flat", serde_json::json!({ "start": 0, "end": huge }), "are not in a box"),
        ("/chunks/0/offset", serde_json::json!([huge, 1]), "exceeds the tensor"),
        ("/chunks/0/offset", serde_json::json!([-1, 0]), "is not a manifest"),
        ("/chunks/0/start", serde_json::json!(huge), "reaches past the end"),
        ("/chunks/0/start", serde_json::json!(100), "has 42 elements"),
        ("/chunks/0/key", serde_json::json!("param/w/0"), "has no tensor \"param/w/0\""),
        ("/chunks/0/file", serde_json::json!("other"), "which the manifest does not list"),
        ("/chunks/1/flat", serde_json::json!({ "start": 10, "end": 26 }), "are in both"),
    ] {
        let saved = Saved::new();
        saved.edit(|json| {
            assert!(json.pointer(first).is_some());
            *json.pointer_mut(&format!("/tensors/0{pointer}")).unwrap() = value.clone();
            if pointer == "/name" {
                json["tensors"][0]["kind"] = "param".into();
            }
        });
        for message in saved.refusals() {
            assert!(message.contains(why), "{pointer} = {value}: {message}");
        }
    }
}

#[test]
fn no_header_of_a_file_makes_a_reader_panic() {
    let saved = Saved::new();
    let mut random = Random::new(5);
    let bytes = fs::read(saved.shard()).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for _ in 0..400 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(header);
            damaged[at] = random.pick(b"0123456789[]{},\":\xff\x00");
        }
        fs::write(saved.shard(), &damaged).unwrap();
        assert!(load_small(&saved.path, &saved.model).unwrap_or(true));
        let _ = verify(&saved.path);
    }
}

#[test]
fn no_manifest_makes_a_reader_panic_though_its_checksum_fits() {
    let saved = Saved::new();
    let mut random = Random::new(6);
    let bytes = fs::read(saved.manifest()).unwrap();
    let body = &bytes[bytes.iter().position(|&b| b == b'\n').unwrap() + 1..];
    for _ in 0..600 {
        let mut damaged = body.to_vec();
        for _ in 0..1 + random.below(3) {
            let at = random.below(damaged.len());
            match random.below(4) {
                // Replacing a digit with a digit keeps it valid JSON, so that the checks after the
                // parser are reached.
                0 | 1 => {
                    if let Some(at) = (at..damaged.len()).find(|&i| damaged[i].is_ascii_digit()) {
                        damaged[at] = b'0' + random.below(10) as u8;
                    }
                }
                2 => drop(damaged.remove(at)),
                _ => damaged[at] = random.pick(b"9-e.[]{},\":\xff"),
            }
        }
        saved.write_body(&damaged);
        let _ = load_small(&saved.path, &saved.model);
        let _ = verify(&saved.path);
    }
}

#[test]
fn a_damaged_chunk_that_nobody_wants_is_found_by_verify_alone() {
    let saved = Saved::new();
    let mut bytes = fs::read(saved.shard()).unwrap();
    let last = bytes.len() - 1; // the second moment of some parameter
    bytes[last] ^= 1;
    fs::write(saved.shard(), bytes).unwrap();
    let layout = Layout::single(saved.model.len());
    let mut shards = layout.empty(&saved.model, 0);
    shards.retain(|shard| shard.kind == StateKind::Param);
    load(&saved.path, &shards).unwrap();
    assert!(message(verify(&saved.path).unwrap_err()).contains("exp_avg_sq/"));
}
