//! The parsers, and their initial inputs.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use megatron::checkpoint::{Float, Manifest, ShardFile, StreamWriter};
use megatron::data::{IndexedDataset, IndexedWriter, TokenType, Tokenizer};
use megatron::params::StateKind;
use models::hf::{HfConfig, HfFiles, HfModel};
use models::megatron_core::MegatronModel;

/// A parser under test.
pub struct Target {
    pub name: &'static str,
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that are meaningful to it.
    pub words: &'static [&'static str],
    /// Parses an input. The folder is kept between runs.
    pub run: fn(&Path, &[u8]),
    /// Maximum memory in bytes, for any input.
    pub memory: usize,
}

const MEMORY: usize = 96 << 20;
/// Memory of a Parquet page, compressed and decompressed, with buffers that grow by doubling.
const MEMORY_OF_PAGES: usize = 800 << 20;

pub fn all() -> Vec<Target> {
    let of =
        |name,
         seeds: fn() -> Vec<Vec<u8>>,
         words: &'static [&'static str],
         run: fn(&Path, &[u8])| Target { name, seeds, words, run, memory: MEMORY };
    vec![
        of("indexed-dataset", indices, &["MMIDIDX\0\0"], indexed_dataset),
        of("index-cache", || vec![index_cache_file()], &["MGTNIDX1"], index_cache),
        of("manifest", || vec![checkpoint("manifest.json")], MANIFEST, manifest),
        of("safetensors", safetensors, SAFETENSORS, shard),
        of("hf-config", configs, CONFIG, hf_config),
        of("hf-index", hf_indices, &["weight_map", "../", "model.safetensors"], hf_index),
        of(
            "hf-weights",
            || vec![fixture("families/bloom/model.safetensors")],
            SAFETENSORS,
            hf_weights,
        ),
        of(
            "megatron-metadata",
            || megatron_files(".metadata"),
            METADATA,
            |folder, input| {
                megatron_model(folder, ".metadata", input);
            },
        ),
        of(
            "megatron-args",
            || megatron_files("common.pt"),
            ARGS,
            |folder, input| megatron_model(folder, "common.pt", input),
        ),
        of(
            "megatron-pieces",
            || megatron_files("__0_0.distcp"),
            &["PK\u{3}\u{4}", "archive/data/0"],
            |folder, input| {
                megatron_model(folder, "__0_0.distcp", input);
            },
        ),
        of("run-file", run_files, &["[model]", "[data]", "\"\"\"", "= [", "{", "'"], run_file),
        of("tokenizer", tokenizers, TOKENIZER, tokenizer),
        of(
            "json-lines",
            || vec![LINES.into()],
            &["\"text\":", "\\ud800", "\n", "[[["],
            |folder, input| documents(folder, "a.jsonl", input),
        ),
        of(
            "text",
            || vec![LINES.into(), b"a\n\nb \xff".to_vec()],
            &["\n\n", "\r"],
            |folder, input| documents(folder, "a.txt", input),
        ),
        of(
            "gzip",
            || vec![gzip()],
            &["\u{1f}"],
            |folder, input| documents(folder, "a.jsonl.gz", input),
        ),
        of("zstd", || vec![zstd()], &[], |folder, input| documents(folder, "a.jsonl.zst", input)),
        Target {
            memory: MEMORY_OF_PAGES,
            ..of("parquet", parquets, &["PAR1", "text"], |folder, input| {
                documents(folder, "a.parquet", input)
            })
        },
        of("store-messages", store_messages, &["MGTSTOR2"], |_, input| {
            megatron::comm::fuzz::store_messages(input)
        }),
        of(
            "rank-messages",
            || vec![megatron::comm::fuzz::header()],
            &[],
            |_, input| megatron::comm::fuzz::headers(input),
        ),
    ]
}

const METADATA: &[&str] =
    &["decoder.layers.", "offsets", "sizes", "chunks", "../", "float32", "\u{5d}", "."];
const ARGS: &[&str] = &["num_layers", "padded_vocab_size", "qk_layernorm", "rope", "none", "."];
const MANIFEST: &[&str] = &[
    "\"chunks\":[",
    "\"offset\":[",
    "\"shape\":[",
    "\"flat\":{",
    "\"start\":",
    "rank_00000.safetensors",
    "../",
];
const SAFETENSORS: &[&str] =
    &["\"data_offsets\":[", "\"shape\":[", "\"dtype\":\"F32\"", "\"BF16\"", "__metadata__"];
const CONFIG: &[&str] = &[
    "\"model_type\":",
    "\"llama\"",
    "\"gpt2\"",
    "\"bloom\"",
    "\"rope_scaling\":",
    "\"num_key_value_heads\":",
    "\"hidden_size\":",
];
const TOKENIZER: &[&str] = &[
    "\"type\":\"BPE\"",
    "\"merges\":[",
    "\"vocab\":{",
    "\"added_tokens\":[",
    "\"ByteLevel\"",
    "\"Regex\":",
];
const LINES: &str = "{\"text\": \"a\\u00e9\\n\", \"meta\": {\"n\": [1, 2.5e3, null]}}\n\n{\"text\": [\"b\", \"\"]}\n{\"text\": null}\n";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(root().join("tests/fixtures").join(name)).unwrap()
}

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
}

/// Creates a file that does not change between runs.
fn once(path: &Path, make: impl FnOnce() -> Vec<u8>) {
    if !path.exists() {
        write(path, &make());
    }
}

fn indices() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    [TokenType::U16, TokenType::I32]
        .map(|kind| {
            let mut writer = IndexedWriter::create(folder.path().join("d"), kind).unwrap();
            for tokens in [&[5, 70, 3][..], &[9], &[], &[1, 2]] {
                writer.add_sequence(tokens).unwrap();
                writer.end_document();
            }
            writer.finish().unwrap();
            let _ = fs::remove_file(folder.path().join("d.bin"));
            fs::read(folder.path().join("d.idx")).unwrap()
        })
        .into()
}

fn indexed_dataset(folder: &Path, input: &[u8]) {
    once(&folder.join("d.bin"), || vec![1; 12]);
    write(&folder.join("d.idx"), input);
    let Ok(dataset) = IndexedDataset::open(folder.join("d")) else { return };
    for i in [0, 1, 3, u64::MAX] {
        let _ = (dataset.document_start(i), dataset.sequence(i), dataset.read_sequence(i));
    }
    let mut tokens = [0; 5];
    let _ = (dataset.read_tokens(1, &mut tokens), dataset.read_tokens(u64::MAX, &mut tokens));
    let _ = dataset.for_each_length(0..dataset.num_sequences().min(100), |_| ());
    let _ = dataset.largest_token(&mut |_| ());
}

fn index_cache_file() -> Vec<u8> {
    let words = [3, 4, 2, 8, 0, 8, 3].map(u64::to_le_bytes);
    [&b"MGTNIDX1"[..], words.as_flattened(), &[1; 8 + 24]].concat()
}

fn index_cache(folder: &Path, input: &[u8]) {
    let path = folder.join("index");
    write(&path, input);
    megatron::data::fuzz::index_cache(&path);
}

/// A file of a small checkpoint.
fn checkpoint(file: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [("a", vec![2, 3], Float::F32), ("b", vec![4], Float::Bf16)];
    let entries =
        tensors.map(|(name, shape, dtype)| (name.to_string(), StateKind::Param, shape, dtype));
    let mut writer = StreamWriter::create(folder.path(), 7, entries).unwrap();
    writer.write(&[1; 24]).unwrap();
    writer.write(&[2; 8]).unwrap();
    let path = writer.finish(&serde_json::json!({"model": 1})).unwrap();
    fs::read(path.join(file)).unwrap()
}

/// Corrects the checksum in the first line, so that the rest is parsed.
fn manifest(folder: &Path, input: &[u8]) {
    once(&folder.join("rank_00000.safetensors"), || checkpoint("rank_00000.safetensors"));
    let body = input.iter().position(|&b| b == b'\n').map_or(&b""[..], |at| &input[at + 1..]);
    let first = format!("{{\"manifest_crc32c\":\"{:08x}\",\n", crc32c::crc32c(body));
    write(&folder.join("manifest.json"), &[first.as_bytes(), body].concat());
    if let Ok(manifest) = Manifest::read(folder) {
        let _ = manifest.verify(&mut |_| ());
        let _ = models::SavedGpt::new(manifest);
    }
}

fn safetensors() -> Vec<Vec<u8>> {
    vec![
        checkpoint("rank_00000.safetensors"),
        fixture("families/mistral-sharded/model-00005-of-00005.safetensors"),
    ]
}

fn shard(folder: &Path, input: &[u8]) {
    let path = folder.join("model.safetensors");
    write(&path, input);
    let Ok(file) = ShardFile::open(&path) else { return };
    for (name, (dtype, shape)) in file.tensors() {
        let elements: usize = shape.iter().product();
        let dtype = dtype.unwrap_or(Float::F32);
        let _ = (file.read(&name, dtype, 0..elements), file.read(&name, dtype, 1..usize::MAX));
    }
}

fn configs() -> Vec<Vec<u8>> {
    ["bloom", "gpt2", "llama2", "llama3-bf16", "mistral-sharded", "qwen2"]
        .map(|family| fixture(&format!("families/{family}/config.json")))
        .into()
}

fn hf_config(folder: &Path, input: &[u8]) {
    let path = folder.join("config.json");
    write(&path, input);
    once(&folder.join("model.safetensors"), || fixture("families/bloom/model.safetensors"));
    let _ = HfConfig::read_file(&path);
    let _ = HfModel::open(folder);
}

fn hf_indices() -> Vec<Vec<u8>> {
    let index = serde_json::json!({"metadata": {}, "weight_map": {
        "param/a/0": "a.safetensors", "param/b/0": "a.safetensors"
    }});
    vec![
        index.to_string().into_bytes(),
        fixture("families/mistral-sharded/model.safetensors.index.json"),
    ]
}

fn hf_index(folder: &Path, input: &[u8]) {
    once(&folder.join("a.safetensors"), || checkpoint("rank_00000.safetensors"));
    write(&folder.join("model.safetensors.index.json"), input);
    if let Ok(files) = HfFiles::open(folder) {
        files.tensors().keys().for_each(|name| drop(files.read(name)));
    }
}

fn hf_weights(folder: &Path, input: &[u8]) {
    once(&folder.join("config.json"), || fixture("families/bloom/config.json"));
    write(&folder.join("model.safetensors"), input);
    if let Ok(model) = HfModel::open(folder) {
        (0..model.parameters().count()).for_each(|i| drop(model.read(i)));
    }
}

/// A file of a Megatron-LM checkpoint.
fn megatron_file(name: &str) -> Vec<u8> {
    fixture(&format!("megatron-core/gpt2-tp2/iter_0000005/{name}"))
}

fn megatron_files(name: &str) -> Vec<Vec<u8>> {
    vec![megatron_file(name)]
}

fn megatron_model(folder: &Path, name: &str, input: &[u8]) {
    for other in [".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__1_0.distcp"] {
        once(&folder.join(other), || megatron_file(other));
    }
    write(&folder.join(name), input);
    if let Ok(model) = MegatronModel::open(folder, None) {
        (0..model.parameters().count()).for_each(|at| drop(model.read(at)));
    }
}

fn run_files() -> Vec<Vec<u8>> {
    vec![
        fs::read(root().join("examples/quickstart.toml")).unwrap(),
        b"[model]\nnum_layers = 2\nswiglu = true\n".to_vec(),
    ]
}

fn run_file(folder: &Path, input: &[u8]) {
    let path = folder.join("run.toml");
    write(&path, input);
    tools::fuzz::run_file(&path);
}

fn tokenizers() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let texts = ["the cat sat on the mat, and the dog sat on the cat. ".repeat(50)];
    Tokenizer::train_on(texts.into_iter().map(Ok), 280, &path).unwrap();
    vec![fs::read(path).unwrap()]
}

fn tokenizer(folder: &Path, input: &[u8]) {
    let path = folder.join("tokenizer.json");
    write(&path, input);
    if let Ok(tokenizer) = Tokenizer::open(&path.display().to_string(), None, folder) {
        let _ =
            tokenizer.encode("the cat, sät\n<|endoftext|>").map(|tokens| tokenizer.decode(&tokens));
    }
}

fn gzip() -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(LINES.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn zstd() -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(LINES.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
}

fn parquets() -> Vec<Vec<u8>> {
    ["plain", "snappy", "snappy-v2", "zstd-delta", "lz4-delta-length", "gzip-large"]
        .map(|name| {
            fs::read(root().join(format!("tools/tests/fixtures/parquet/{name}.parquet"))).unwrap()
        })
        .into()
}

fn documents(folder: &Path, name: &str, input: &[u8]) {
    let path = folder.join(name);
    write(&path, input);
    tools::fuzz::documents(&path);
}

/// A request and a reply of the store.
fn store_messages() -> Vec<Vec<u8>> {
    vec![
        b"MGTSTOR2\x01\x03\x00key\x02\x00\x00\x00ab".to_vec(),
        b"MGTSTOR2\x00\x02\x00\x00\x00ab".to_vec(),
    ]
}
