//! `megatron preprocess` and `megatron tokenizer`: convert text into token files, and train
//! vocabularies on text.
//!
//! Source: Megatron-LM `tools/preprocess_data.py`. For the same tokens, the output is the same byte
//! for byte.

pub mod documents;
pub mod input;
mod parquet;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use megatron::data::{IndexedWriter, Part, SplitPoints, TokenType, Tokenizer};
use rayon::prelude::*;

use crate::cli::flags::{ChosenTokenizer, TokenizerFlags};
use crate::error::{Error, Result};
use crate::print_line;
use documents::{Piece, Pieces};
use input::{Format, Input, records_in};

/// Turn text into an indexed dataset for `--data-path`
///
/// Reads JSON lines (each line is a document), text (each file is a document, and its paragraphs
/// are sequences) and Parquet (each row is a document). JSON lines and text may be compressed with
/// gzip or zstd. Writes PREFIX_KEY_document.bin and .idx for every key, byte for byte as
/// Megatron-LM's preprocess_data does: 16-bit tokens for vocabularies below 65,500, otherwise
/// 32-bit tokens. A document without text is kept as an empty document. Memory grows by only 12
/// bytes per document. The files appear under their names when they are complete.
///
/// Tokens are those of one call of the tokenizer on the whole document, as in transformers. Special
/// tokens that are spelled out in the text become those tokens, and the tokenizer adds the tokens
/// that it puts around a text. If one of these ends the document, --append-eod does not add a
/// second one. A text file that cannot be split without changing a token is held in memory as a
/// whole.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  megatron preprocess --input corpus.jsonl.zst --tokenizer tokenizer.json --append-eod --output-prefix data/corpus
  megatron pretrain run.toml --data-path data/corpus_text_document --tokenizer tokenizer.json")]
pub struct PreprocessArgs {
    /// Files to read, in this order: .jsonl or .json (one JSON object per line), .parquet, or text
    /// under any other name, with .gz or .zst if compressed; or folders of text, as `pretrain
    /// --data-path` takes them
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub input: Vec<PathBuf>,
    /// Keys of the JSON objects, or columns, that hold text; each becomes a separate dataset
    #[arg(long, value_name = "KEY", num_args = 1.., default_value = "text")]
    pub json_keys: Vec<String>,
    #[command(flatten)]
    pub tokenizer: TokenizerFlags,
    /// Size of the vocabulary for --tokenizer-type NullTokenizer
    #[arg(long, value_name = "N")]
    pub vocab_size: Option<usize>,
    /// Append the tokenizer's end-of-document token to every document
    #[arg(long)]
    pub append_eod: bool,
    /// Threads for tokenizing [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// Path prefix of the files to write
    #[arg(long, value_name = "PREFIX")]
    pub output_prefix: PathBuf,
    /// Replace existing datasets
    #[arg(long)]
    pub overwrite: bool,
}

/// Create a tokenizer
#[derive(Args, Clone, Debug)]
pub struct TokenizerArgs {
    #[command(subcommand)]
    pub what: TokenizerCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub enum TokenizerCommand {
    Train(TrainArgs),
}

/// Train a byte-level BPE vocabulary on text
///
/// Writes a tokenizer.json that `preprocess`, `pretrain` and the Hugging Face libraries load. Its
/// token <|endoftext|> ends documents. Every text can be encoded: each of the 256 bytes is a token.
#[derive(Args, Clone, Debug)]
pub struct TrainArgs {
    /// Largest size of the vocabulary in tokens; at least 257
    #[arg(long, value_name = "N")]
    pub vocab_size: usize,
    /// Files and folders to read, as `preprocess` takes them
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub input: Vec<PathBuf>,
    /// Keys of the JSON objects that hold text
    #[arg(long, value_name = "KEY", num_args = 1.., default_value = "text")]
    pub json_keys: Vec<String>,
    /// The file to write
    #[arg(long, value_name = "FILE", default_value = "tokenizer.json")]
    pub output: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    pub overwrite: bool,
}

/// Bytes of input that are tokenized at a time.
const BATCH: usize = 1 << 22;
/// Batches that wait for the workers.
const AHEAD: usize = 1;

/// Runs `preprocess` and returns the exit code to end with.
///
/// # Errors
/// If a file cannot be read or written, or holds no text.
pub fn run(args: &PreprocessArgs) -> Result<u8> {
    let inputs = open_inputs(&args.input, &args.json_keys)?;
    let ChosenTokenizer { name, options, note } = args.tokenizer.choose(args.vocab_size)?;
    let name = name.ok_or_else(|| {
        Error::usage("no tokenizer: give --tokenizer a tokenizer.json or its folder, or `byte`")
    })?;
    if name.starts_with("train:") {
        return Err(Error::usage(format!(
            "--tokenizer {name}: first train the vocabulary with `megatron tokenizer train`, then give its tokenizer.json",
        )));
    }
    note.iter().for_each(|note| print_line(note));
    let tokenizer = Tokenizer::open_with(&name, &options, None, Path::new(""))?;
    tokenizer.notes().iter().for_each(|note| print_line(note));
    let eod = match (args.append_eod, tokenizer.eod()) {
        (true, Some(_)) if tokenizer.ends_documents() => None,
        (false, _) => None,
        (true, Some(eod)) => Some(eod),
        (true, None) => {
            return Err(Error::usage(format!("--append-eod: {}", tokenizer.lacks_eod())));
        }
    };
    for key in &args.json_keys {
        let files = dataset_files(&dataset_prefix(&args.output_prefix, key));
        files.iter().try_for_each(|file| expect_free(file, &inputs, args.overwrite))?;
    }
    // A key may have a slash.
    for key in &args.json_keys {
        create_folder(&dataset_prefix(&args.output_prefix, key))?;
    }
    let token_type = TokenType::for_vocabulary(tokenizer.vocab_size());
    let mut outputs = args
        .json_keys
        .iter()
        .map(|key| Output::create(&args.output_prefix, key, token_type))
        .collect::<Result<Vec<_>>>()?;
    let workers = args.workers.map_or(0, usize::from);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(workers)
        .build()
        .map_err(|error| Error::usage(format!("--workers {workers}: {error}; give fewer")))?;
    let mut progress = Progress::new();
    let (sender, batches) = sync_channel(AHEAD);
    std::thread::scope(|scope| {
        let pieces = Pieces::new(inputs, &args.json_keys, tokenizer.split_points());
        scope.spawn(move || send_batches(pieces, &sender));
        // Dropped on an error, which stops the reader.
        for batch in batches {
            let batch = batch?;
            let bytes = batch.iter().map(Piece::len).sum();
            let encode = |piece| encode(piece, &args.json_keys, &tokenizer);
            let encoded: Vec<_> = pool.install(|| batch.into_par_iter().map(encode).collect());
            for piece in encoded {
                let Encoded { keys, last } = piece?;
                for (output, sequences) in outputs.iter_mut().zip(keys) {
                    output.add(sequences, last, eod)?;
                }
            }
            progress.add(bytes, &outputs[0]);
        }
        Ok::<_, Error>(())
    })?;
    progress.finish();
    // All of them or none.
    outputs.iter().try_for_each(Output::expect_tokens)?;
    for output in outputs {
        output.finish(progress.start.elapsed(), progress.bytes)?;
    }
    Ok(0)
}

/// Runs `tokenizer` and returns the exit code to end with.
///
/// # Errors
/// If a file cannot be read or written, or the vocabulary is too small.
pub fn run_tokenizer(args: &TokenizerArgs) -> Result<u8> {
    let TokenizerCommand::Train(args) = &args.what;
    let inputs = open_inputs(&args.input, &args.json_keys)?;
    expect_free(&args.output, &inputs, args.overwrite)?;
    create_folder(&args.output)?;
    let keys = args.json_keys.clone();
    let texts =
        Pieces::new(inputs, &keys.clone(), SplitPoints::between_words()).flat_map(move |piece| {
            match piece.and_then(|piece| piece.texts(&keys)) {
                Ok(texts) => texts.into_iter().flatten().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            }
        });
    let tokenizer = Tokenizer::train_on(texts, args.vocab_size, &args.output)?;
    print_line(&format!("{}: {} tokens", args.output.display(), tokenizer.vocab_size()));
    Ok(0)
}

fn open_inputs(paths: &[PathBuf], keys: &[String]) -> Result<Vec<Input>> {
    for records in paths.iter().filter_map(|path| records_in(path)) {
        print_line(&format!(
            "note: only text is read from folders; files such as {} are left out, so name them if they are wanted",
            records.display()
        ));
    }
    let inputs =
        paths.iter().map(|path| Input::of(path)).collect::<megatron::Result<Vec<_>>>()?.concat();
    if let Some((i, key)) = keys.iter().enumerate().find(|(i, key)| keys[..*i].contains(key)) {
        return Err(Error::usage(format!(
            "--json-keys names \"{key}\" twice, the second time as key {}",
            i + 1
        )));
    }
    match inputs.iter().find(|input| input.format == Format::Text) {
        Some(input) if keys.len() > 1 => Err(Error::usage(format!(
            "{} is text without keys, but --json-keys names {}; preprocess it separately",
            input.path.display(),
            keys.len()
        ))),
        _ => Ok(inputs),
    }
}

/// The prefix of the files of a key.
fn dataset_prefix(prefix: &Path, key: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(format!("_{key}_document"));
    PathBuf::from(name)
}

/// The two files of an indexed dataset.
fn dataset_files(prefix: &Path) -> [PathBuf; 2] {
    [".bin", ".idx"].map(|ending| {
        let mut name = prefix.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    })
}

/// Checks that an output replaces no input, and existing files only with `overwrite`.
fn expect_free(output: &Path, inputs: &[Input], overwrite: bool) -> Result<()> {
    let Ok(there) = std::fs::canonicalize(output) else { return Ok(()) };
    if inputs
        .iter()
        .any(|input| std::fs::canonicalize(&input.path).is_ok_and(|input| input == there))
    {
        return Err(Error::usage(format!(
            "{} is an input and cannot also be the output; give another output",
            output.display()
        )));
    }
    if overwrite {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{} already exists; write elsewhere, or replace it with --overwrite",
        output.display()
    )))
}

fn create_folder(output: &Path) -> Result<()> {
    match output.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => std::fs::create_dir_all(folder).map_err(|source| Error::Io {
            action: format!("create the folder {}", folder.display()),
            source,
        }),
        None => Ok(()),
    }
}

/// Reads ahead of the workers, until they stop.
fn send_batches(pieces: Pieces, sender: &SyncSender<megatron::Result<Vec<Piece>>>) {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for piece in pieces {
        match piece {
            Ok(piece) => {
                bytes += piece.len() + size_of::<Piece>(); // documents may be empty
                batch.push(piece);
            }
            Err(error) => {
                // If the receiver stopped, it reports its own error.
                let _ = sender.send(Err(error));
                return;
            }
        }
        if bytes >= BATCH {
            bytes = 0;
            if sender.send(Ok(std::mem::take(&mut batch))).is_err() {
                return;
            }
        }
    }
    let _ = sender.send(Ok(batch));
}

/// The tokens of a piece: for each key its sequences.
struct Encoded {
    keys: Vec<Vec<Vec<u32>>>,
    last: bool,
}

fn encode(piece: Piece, keys: &[String], tokenizer: &Tokenizer) -> megatron::Result<Encoded> {
    let last = piece.is_last();
    let sequences = |parts: Vec<Part>| {
        let encoded = parts
            .iter()
            .map(|part| tokenizer.encode_part(part))
            .collect::<megatron::Result<Vec<_>>>();
        encoded.map(|sequences| sequences.concat())
    };
    let keys = piece.parts(keys)?.into_iter().map(sequences).collect::<megatron::Result<_>>()?;
    Ok(Encoded { keys, last })
}

/// The dataset of a key.
struct Output {
    prefix: PathBuf,
    writer: IndexedWriter,
    documents: u64,
    tokens: u64,
    /// The current document has tokens.
    has_tokens: bool,
}

impl Output {
    fn create(prefix: &Path, key: &str, token_type: TokenType) -> Result<Self> {
        let prefix = dataset_prefix(prefix, key);
        let writer = IndexedWriter::create(&prefix, token_type)?;
        Ok(Self { prefix, writer, documents: 0, tokens: 0, has_tokens: false })
    }

    /// Appends a piece's sequences. Empty ones are left out, and a document without tokens does not
    /// get an end.
    fn add(&mut self, mut sequences: Vec<Vec<u32>>, last: bool, eod: Option<u32>) -> Result<()> {
        sequences.retain(|sequence| !sequence.is_empty());
        self.has_tokens |= !sequences.is_empty();
        if last
            && self.has_tokens
            && let Some(eod) = eod
        {
            match sequences.last_mut() {
                Some(sequence) => sequence.push(eod),
                None => sequences.push(vec![eod]),
            }
        }
        for sequence in &sequences {
            self.tokens += sequence.len() as u64;
            self.writer.add_sequence(sequence)?;
        }
        if last {
            self.writer.end_document();
            self.documents += 1;
            self.has_tokens = false;
        }
        Ok(())
    }

    fn expect_tokens(&self) -> Result<()> {
        if self.tokens > 0 {
            return Ok(());
        }
        let message = "was not written: the input has no text; give files with text";
        Err(Error::Run(megatron::Error::data(&self.prefix, message)))
    }

    fn finish(self, elapsed: Duration, bytes: u64) -> Result<()> {
        let prefix = self.prefix.display();
        self.writer.finish()?;
        let seconds = elapsed.as_secs_f64().max(1e-9);
        print_line(&format!(
            "{prefix}: {} documents, {} tokens in {seconds:.1} s ({:.1} MB/s)",
            self.documents,
            self.tokens,
            bytes as f64 / 1e6 / seconds
        ));
        Ok(())
    }
}

/// Shows progress on a terminal.
struct Progress {
    bar: ProgressBar,
    start: Instant,
    bytes: u64,
}

impl Progress {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            bar.set_style(style);
        }
        Self { bar, start: Instant::now(), bytes: 0 }
    }

    fn add(&mut self, bytes: usize, output: &Output) {
        self.bytes += bytes as u64;
        let rate = self.bytes as f64 / 1e6 / self.start.elapsed().as_secs_f64().max(1e-9);
        let (documents, tokens) = (output.documents, output.tokens);
        self.bar.set_message(format!("{documents} documents, {tokens} tokens, {rate:.1} MB/s"));
        self.bar.tick();
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
