//! The metadata of a Parquet file: its columns, and the positions of the requested columns' data.
//!
//! Source: parquet-format, `src/main/thrift/parquet.thrift`.

use super::Read;
use super::thrift::{Kind, Thrift};

/// A requested column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnInfo {
    /// Its index among the columns that have data.
    leaf: usize,
    /// Rows may have no value.
    pub optional: bool,
}

/// Position of a column's values in a row group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkInfo {
    pub codec: i64,
    pub start: u64,
    pub end: u64,
}

/// A group of consecutive rows.
#[derive(Debug)]
pub struct RowGroup {
    pub rows: u64,
    /// A chunk for each requested column.
    pub chunks: Vec<ChunkInfo>,
}

/// The parts of a file's metadata that are needed.
#[derive(Debug)]
pub struct Metadata {
    pub columns: Vec<ColumnInfo>,
    pub groups: Vec<RowGroup>,
}

/// A field of a row, or a structure of several fields.
#[derive(Default)]
struct SchemaElement {
    name: String,
    physical: Option<i64>,
    repetition: i64,
    children: i64,
    converted: Option<i64>,
}

const OPTIONAL: i64 = 1;
const REPEATED: i64 = 2;
const BYTE_ARRAY: i64 = 6;
const PHYSICAL: [&str; 8] =
    ["booleans", "i32", "i64", "i96", "f32", "f64", "byte strings", "byte strings of fixed length"];
/// Byte strings that are not text, by their converted type.
const NO_TEXT: [(i64, &str); 3] = [(5, "decimals"), (12, "BSON"), (21, "intervals")];
/// Number of columns to list if the requested one is missing.
const NAMED: usize = 8;

impl Metadata {
    /// Reads the metadata of a file with data before `data_end`, for the columns called `keys`.
    pub fn read(bytes: &[u8], keys: &[String], data_end: u64) -> Read<Self> {
        let (mut schema, mut columns) = (Vec::new(), None);
        let (mut rows, mut groups) = (None, None);
        let described = &mut |id, kind, thrift: &mut Thrift| {
            match (id, kind) {
                (2, Kind::List) => {
                    each(thrift, |thrift| element(thrift).map(|element| schema.push(element)))?;
                    columns =
                        Some(keys.iter().map(|key| find(&schema, key)).collect::<Read<Vec<_>>>()?);
                }
                (3, Kind::Int) => rows = Some(thrift.int()?),
                (4, Kind::List) => {
                    let columns =
                        columns.as_ref().ok_or("its row groups come before its schema")?;
                    let found = groups.insert(Vec::<RowGroup>::new());
                    each(thrift, |thrift| {
                        row_group(thrift, columns, data_end).map(|group| found.extend(group))
                    })?;
                }
                (8, _) => return Err("it is encrypted; decrypt it first".into()),
                _ => return Ok(false),
            }
            Ok(true)
        };
        Thrift::new(bytes).structure(described)?;
        let columns = columns.ok_or("it has no schema")?;
        let (rows, groups) = rows.zip(groups).ok_or("it has no row groups")?;
        // A wrong number of rows in a group would silently drop documents.
        let held: i128 = groups.iter().map(|group| i128::from(group.rows)).sum();
        if held != i128::from(rows) {
            return Err(format!(
                "its row groups hold {held} of {rows} rows; copy or create it again"
            ));
        }
        Ok(Self { columns, groups })
    }
}

/// Hands every element of a list of structures to `f`.
fn each(thrift: &mut Thrift, mut f: impl FnMut(&mut Thrift) -> Read<()>) -> Read<()> {
    match thrift.list()? {
        (Kind::Struct, len) => (0..len).try_for_each(|_| f(thrift)),
        (_, 0) => Ok(()),
        (kind, _) => Err(format!("elements of type {kind:?} are where structures are expected")),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn element(thrift: &mut Thrift) -> Read<SchemaElement> {
    let mut element = SchemaElement::default();
    thrift.structure(&mut |id, kind, thrift| {
        match (id, kind) {
            (1, Kind::Int) => element.physical = Some(thrift.int()?),
            (3, Kind::Int) => element.repetition = thrift.int()?,
            (4, Kind::Binary) => element.name = text(thrift.binary()?),
            (5, Kind::Int) => element.children = thrift.int()?,
            (6, Kind::Int) => element.converted = Some(thrift.int()?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok(element)
}

/// The column of text called `key`. The schema is a tree, depth first, under a root.
fn find(schema: &[SchemaElement], key: &str) -> Read<ColumnInfo> {
    let (mut leaf, mut names) = (0, Vec::new());
    let mut at = 1;
    while let Some(top) = schema.get(at) {
        let first_leaf = leaf;
        // Elements of the tree that are still to come.
        let mut open = 1i64;
        while open > 0 {
            let part = schema.get(at).ok_or("its columns do not form a tree")?;
            leaf += usize::from(part.children <= 0);
            open = open.saturating_add(part.children.max(0)) - 1;
            at += 1;
        }
        if top.name != key {
            names.push(top.name.as_str());
            continue;
        }
        let refuse = |what: &str| {
            Err(format!(
                "column {key:?} holds {what}, not one string per row; give --json-keys another column"
            ))
        };
        if top.children > 0 || top.repetition == REPEATED {
            return refuse("lists or structures");
        }
        return match (top.physical, top.converted) {
            (Some(BYTE_ARRAY), converted) => match NO_TEXT
                .iter()
                .find(|(number, _)| Some(*number) == converted)
            {
                Some((_, what)) => refuse(what),
                None => Ok(ColumnInfo { leaf: first_leaf, optional: top.repetition == OPTIONAL }),
            },
            (physical, _) => {
                let known = physical.and_then(|number| PHYSICAL.get(usize::try_from(number).ok()?));
                refuse(known.unwrap_or(&"values of an unknown type"))
            }
        };
    }
    let found =
        if names.is_empty() { "none".into() } else { names[..names.len().min(NAMED)].join(", ") };
    Err(format!(
        "there is no column {key:?}; give --json-keys one of the existing columns: {found}"
    ))
}

/// A row group, unless it is empty: writers give empty groups no position in the file.
fn row_group(thrift: &mut Thrift, columns: &[ColumnInfo], data_end: u64) -> Read<Option<RowGroup>> {
    let mut group = RowGroup { rows: 0, chunks: Vec::new() };
    thrift.structure(&mut |id, kind, thrift| {
        match (id, kind) {
            (1, Kind::List) => {
                let (mut leaf, mut found) = (0, vec![None; columns.len()]);
                each(thrift, |thrift| {
                    let wanted = columns.iter().position(|column| column.leaf == leaf);
                    leaf += 1;
                    match wanted {
                        Some(at) => found[at] = Some(chunk(thrift, data_end)?),
                        None => thrift.structure(&mut |_, _, _| Ok(false))?,
                    }
                    Ok(())
                })?;
                group.chunks =
                    found.into_iter().collect::<Option<_>>().ok_or("a row group lacks a column")?;
            }
            (3, Kind::Int) => {
                group.rows = thrift
                    .int()?
                    .try_into()
                    .map_err(|_| "a row group has a negative number of rows")?
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    if group.chunks.is_empty() {
        return Err("a row group has no columns".into());
    }
    Ok((group.rows > 0).then_some(group))
}

fn chunk(thrift: &mut Thrift, data_end: u64) -> Read<ChunkInfo> {
    let mut described = None;
    thrift.structure(&mut |id, kind, thrift| {
        match (id, kind) {
            (1, Kind::Binary) => {
                let file = text(thrift.binary()?);
                return Err(format!("its data are in another file, {file:?}; give that file"));
            }
            (3, Kind::Struct) => described = Some(chunk_data(thrift)?),
            (8 | 9, _) => return Err("it is encrypted; decrypt it first".into()),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let [codec, bytes, data, dictionary, values] =
        described.ok_or("a column's data is not described")?;
    if values == 0 {
        return Ok(ChunkInfo { codec, start: 0, end: 0 });
    }
    // The dictionary comes first; old writers leave its offset out or write 0.
    let start = if dictionary > 0 { data.min(dictionary) } else { data };
    let place = || {
        let start = u64::try_from(start).ok()?;
        let end = start.checked_add(u64::try_from(bytes).ok()?)?;
        (start >= 4 && end <= data_end).then_some(ChunkInfo { codec, start, end })
    };
    place().ok_or_else(|| format!("a column's {bytes} bytes from {start} on are not in the file"))
}

/// Codec, compressed bytes, offset of the first page of data, offset of the dictionary, number of
/// values.
fn chunk_data(thrift: &mut Thrift) -> Read<[i64; 5]> {
    let mut found = [0; 5];
    thrift.structure(&mut |id, kind, thrift| {
        let at = match (id, kind) {
            (4, Kind::Int) => 0,
            (5, Kind::Int) => 4,
            (7, Kind::Int) => 1,
            (9, Kind::Int) => 2,
            (11, Kind::Int) => 3,
            _ => return Ok(false),
        };
        found[at] = thrift.int()?;
        Ok(true)
    })?;
    Ok(found)
}
