//! Tests with pickles written by hand, and with the fixtures' own, complete and damaged.

use std::path::{Path, PathBuf};

use megatron::config::{ModelConfig, Normalization, PositionEmbedding, RopeScaling};

use super::config::{Args, Vocabulary};
use super::pickle::Pickle;

/// The Python values that the tests need.
#[derive(Clone, Copy)]
enum Py {
    None,
    Bool(bool),
    Int(i32),
    Float(f64),
    Str(&'static str),
    List(usize),
}

fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn pickled(value: Py) -> Vec<u8> {
    match value {
        Py::None => b"N".to_vec(),
        Py::Bool(value) => vec![if value { 0x88 } else { 0x89 }],
        Py::Int(value) => [&b"J"[..], &value.to_le_bytes()].concat(),
        Py::Float(value) => [&b"G"[..], &value.to_be_bytes()].concat(),
        Py::Str(value) => text(value),
        Py::List(length) => [&b"]("[..], &b"K\x01".repeat(length), b"e"].concat(),
    }
}

/// The pickle of `{"args": argparse.Namespace(…)}`.
fn common(args: &[(&str, Py)]) -> Vec<u8> {
    let fields: Vec<u8> =
        args.iter().flat_map(|(name, value)| [text(name), pickled(*value)].concat()).collect();
    [b"\x80\x02}", &text("args")[..], b"cargparse\nNamespace\n)\x81}(", &fields, b"ubs."].concat()
}

const LLAMA: [(&str, Py); 20] = [
    ("num_layers", Py::Int(2)),
    ("hidden_size", Py::Int(32)),
    ("ffn_hidden_size", Py::Int(48)),
    ("num_attention_heads", Py::Int(4)),
    ("group_query_attention", Py::Bool(true)),
    ("num_query_groups", Py::Int(2)),
    ("kv_channels", Py::Int(8)),
    ("seq_length", Py::Int(16)),
    ("max_position_embeddings", Py::Int(64)),
    ("position_embedding_type", Py::Str("rope")),
    ("rotary_base", Py::Int(10000)),
    ("rotary_percent", Py::Float(1.0)),
    ("normalization", Py::Str("RMSNorm")),
    ("norm_epsilon", Py::Float(1e-6)),
    ("swiglu", Py::Bool(true)),
    ("add_bias_linear", Py::Bool(false)),
    ("untie_embeddings_and_output_weights", Py::Bool(true)),
    ("vocab_size", Py::None),
    ("padded_vocab_size", Py::Int(128)),
    ("make_vocab_size_divisible_by", Py::Int(64)),
];

/// The model for these arguments with `changes`.
fn model(changes: &[(&'static str, Py)]) -> Result<(ModelConfig, Vocabulary), String> {
    let kept = LLAMA.iter().filter(|(name, _)| !changes.iter().any(|(other, _)| other == name));
    let bytes = common(&kept.chain(changes).copied().collect::<Vec<_>>());
    let pickle = Pickle::parse(&bytes)?;
    Args::of(pickle.root())?.model(128, None)
}

#[test]
fn arguments_become_the_model_they_describe() {
    let (llama, vocabulary) = model(&[]).unwrap();
    assert_eq!((llama.num_query_groups, llama.head_dim, llama.norm_epsilon), (2, 8, 1e-6));
    assert_eq!(
        (llama.position_embedding, llama.rope_scaling),
        (PositionEmbedding::Rope, RopeScaling::None)
    );
    assert_eq!(
        (llama.normalization, llama.swiglu, llama.qkv_bias),
        (Normalization::RMSNorm, true, false)
    );
    assert_eq!(vocabulary, Vocabulary::Padded(128));
    let scaled =
        model(&[("use_rope_scaling", Py::Bool(true)), ("rope_scaling_factor", Py::Float(32.0))])
            .unwrap()
            .0;
    assert_eq!(scaled.rope_scaling, RopeScaling::llama3(32.0));
    // Without group_query_attention the recorded number of groups has no meaning.
    let heads =
        model(&[("group_query_attention", Py::Bool(false)), ("num_query_groups", Py::Int(1))])
            .unwrap()
            .0;
    assert_eq!(heads.num_query_groups, 4);
    let biased =
        model(&[("add_bias_linear", Py::Bool(true)), ("add_qkv_bias", Py::Bool(true))]).unwrap().0;
    assert_eq!((biased.bias_linear, biased.qkv_bias), (true, false));
    let older =
        model(&[("norm_epsilon", Py::None), ("layernorm_epsilon", Py::Float(1e-5))]).unwrap().0;
    assert_eq!(older.norm_epsilon, 1e-5);
}

#[test]
fn what_the_model_here_has_not_is_refused_by_name() {
    let gelu = [("swiglu", Py::Bool(false)), ("add_bias_linear", Py::Bool(true))];
    for (changes, why) in [
        (&[("rotary_percent", Py::Float(0.5))][..], "rotary_percent 0.5"),
        (&[("rotary_interleaved", Py::Bool(true))], "rotary_interleaved = True"),
        (
            &[("qk_layernorm", Py::Bool(true)), ("num_experts", Py::Int(8))],
            "num_experts = 8, qk_layernorm = True",
        ),
        (&[("multi_latent_attention", Py::Bool(true))], "multi_latent_attention"),
        (&[("apply_layernorm_1p", Py::Bool(true))], "apply_layernorm_1p"),
        (&[("squared_relu", Py::Bool(true))], "squared_relu"),
        (&[("window_size", Py::List(2))], "window_size = a list of 2"),
        (&[("softmax_scale", Py::Float(0.25))], "softmax_scale = 0.25"),
        (&[("softmax_type", Py::Str("off-by-one"))], "softmax_type"),
        (&[("position_embedding_type", Py::Str("yarn"))], "\"yarn\""),
        (&[("position_embedding_type", Py::None)], "position_embedding_type"),
        (&[("normalization", Py::Str("L2Norm"))], "L2Norm"),
        (&[("norm_epsilon", Py::None)], "norm_epsilon"),
        (&[("norm_epsilon", Py::Float(1e-5)), ("layernorm_epsilon", Py::Float(1e-6))], "differ"),
        (&[("num_query_groups", Py::Int(3))], "3 query groups"),
        (&[("num_attention_heads", Py::Int(0))], "0 is not a multiple"),
        (&[("hidden_size", Py::Str("32"))], "hidden_size is \"32\""),
        (&[("hidden_size", Py::Int(-32))], "hidden_size is -32"),
        (&[("num_layers", Py::Int(1 << 20))], "num_layers"),
        (&[("padded_vocab_size", Py::Int(64))], "padded_vocab_size is 64"),
        (&[("norm_epsilon", Py::Float(-1.0))], "norm_epsilon"),
        // Megatron computes GELU by erf, except in one kernel.
        (&gelu, "GELU exactly"),
        (&[gelu[0], ("bias_gelu_fusion", Py::Bool(true))], "GELU exactly"),
        (
            &[
                gelu[0],
                gelu[1],
                ("bias_gelu_fusion", Py::Bool(true)),
                ("use_te_activation_func", Py::Bool(true)),
            ],
            "GELU exactly",
        ),
    ] {
        let message = model(changes).err().unwrap_or_default();
        assert!(message.contains(why), "{why}: {message:?}");
    }
    model(&[gelu[0], gelu[1], ("bias_gelu_fusion", Py::Bool(true))]).unwrap();
    // Arguments without content are allowed.
    let silent = [
        ("num_experts", Py::None),
        ("qk_layernorm", Py::Bool(false)),
        ("hybrid_attention_ratio", Py::Float(0.0)),
    ];
    model(&[silent[0], silent[1], silent[2], ("spec", Py::List(0))]).unwrap();
}

#[test]
fn a_vocabulary_is_taken_from_who_knows_it() {
    let sized = |size, more: &[(&'static str, Py)]| {
        model(&[&[("vocab_size", Py::Int(size))], more].concat()).unwrap().1
    };
    assert_eq!(sized(100, &[]), Vocabulary::Recorded(100));
    assert_eq!(
        sized(99, &[("tokenizer_type", Py::Str("NullTokenizer"))]),
        Vocabulary::Recorded(100)
    );
    // The size of another tokenizer than the one whose tokens were padded.
    assert_eq!(sized(30, &[]), Vocabulary::Padded(128));
    assert_eq!(sized(30, &[("tensor_model_parallel_size", Py::Int(2))]), Vocabulary::Recorded(30));
    assert_eq!(sized(0, &[]), Vocabulary::Padded(128));
}

#[test]
fn a_checkpoint_without_arguments_is_refused() {
    let refusal = |bytes: &[u8]| Args::of(Pickle::parse(bytes).unwrap().root()).err().unwrap();
    assert!(refusal(b"\x80\x02}.").contains("NeMo"));
    assert!(
        refusal(&[b"\x80\x02}", &text("args")[..], b"K\x01s."].concat()).contains("its args are 1")
    );
}

#[test]
fn values_of_all_kinds_are_read() {
    let bytes = [
        &b"\x80\x04\x95\0\0\0\0\0\0\0\0("[..],
        b"K\xffM\xff\xffJ\xff\xff\xff\xff\x8a\x02\0\x80\x8a\0\x8a\x09\0\0\0\0\0\0\0\0\x01",
        b"G\x3f\xf0\0\0\0\0\0\0\x8c\x02hi\x94C\x01xN\x88\x89)h\0\x86l.",
    ]
    .concat();
    let pickle = Pickle::parse(&bytes).unwrap();
    let item = |index| pickle.root().item(index).unwrap();
    let ints: Vec<_> = (0..6).map(|index| item(index).int()).collect();
    assert_eq!(ints, [Some(255), Some(65535), Some(-1), Some(-32768), Some(0), None]);
    assert_eq!((item(6).float(), item(7).str(), item(8).str()), (Some(1.0), Some("hi"), None));
    assert!(item(9).is_none() && item(10).bool() == Some(true) && item(11).bool() == Some(false));
    // A tuple of the empty tuple and of a remembered value.
    assert_eq!(item(12).items().unwrap().len(), 2);
    assert_eq!(item(12).item(1).unwrap().str(), Some("hi"));
    assert!(pickle.root().item(13).is_none());
}

#[test]
fn nothing_is_called_and_cycles_do_no_harm() {
    let bytes = [&b"\x80\x02cos\nsystem\n"[..], &text("rm -rf /"), b"\x85R."].concat();
    let pickle = Pickle::parse(&bytes).unwrap();
    assert_eq!(pickle.root().class(), Some(("os", "system")));
    // A list that contains itself.
    let pickle = Pickle::parse(b"\x80\x02]q\0h\0a.").unwrap();
    assert_eq!(pickle.root().item(0).unwrap().item(0).unwrap().shown(), "a list of 1");
}

#[test]
fn what_is_no_pickle_is_refused_with_the_place() {
    for (bytes, why) in [
        (&b""[..], "ends early"),
        (b"\x80\x01.", "protocol 2 to 5"),
        (b"\x80\x02.", "a value is missing at byte 3"),
        (b"\x80\x02(K\x01", "ends early"),
        (b"\x80\x02}K\x01(0.", "a value is missing"),
        (b"\x80\x02K\x01e.", "a mark is missing"),
        (b"\x80\x02K\x01K\x02a.", "no container"),
        (b"\x80\x02)K\x02a.", "no container"),
        (b"\x80\x02}(K\x02u.", "no value"),
        (b"\x80\x02}K\x02b.", "no object"),
        (b"\x80\x02K\x01K\x02\x93.", "no name"),
        (b"\x80\x02h\x05.", "not memoized"),
        (b"\x80\x02X\xff\xff\xff\xffa.", "ends early"),
        (b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.", "ends early"),
        (b"\x80\x02\xf0.", "0xf0 is unknown"),
    ] {
        let message = Pickle::parse(bytes).err().unwrap_or_default();
        assert!(
            message.contains("is not a valid pickle") && message.contains(why),
            "{why}: {message}"
        );
    }
    // One byte per value.
    let many = [&b"\x80\x02"[..], &b"]".repeat(10_000), b"."].concat();
    assert!(Pickle::parse(&many).err().unwrap().contains("more values than its size allows"));
    let many = [&b"\x80\x04N"[..], &b"\x94".repeat(10_000), b"."].concat();
    assert!(Pickle::parse(&many).err().unwrap().contains("memoizes more values"));
}

#[test]
fn a_pickle_that_was_cut_off_or_has_a_flipped_bit_does_no_harm() {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/megatron-core/llama-tp2-pp2/iter_0000005");
    let whole = std::fs::read(folder.join(".metadata")).unwrap();
    Pickle::parse(&whole).unwrap();
    for length in (0..whole.len()).step_by(3) {
        assert!(Pickle::parse(&whole[..length]).is_err(), "{length} bytes");
    }
    let mut damaged = whole.clone();
    for at in 0..whole.len() {
        damaged[at] ^= 1 << (at % 8);
        if let Ok(pickle) = Pickle::parse(&damaged) {
            let _ = (
                pickle.root().shown(),
                pickle.root().attribute("storage_data").map(|value| value.shown()),
            );
        }
        damaged[at] = whole[at];
    }
}
