//! Python's pickles as trees of values. Nothing is called or built: a class is only a name, and an
//! object only its class and arguments.
//!
//! Opcodes of protocols 2 to 5: CPython `Lib/pickletools.py`. Values are indices into a list and no
//! function recurses, so nesting needs no depth limit, and cycles are harmless.
//!
//! `candle_core::pickle` (0.11.1) is not used, for four reasons. It does not read protocol 4, in
//! which torch writes a checkpoint's `.metadata`. A list that is referenced twice is empty the
//! second time. 200,000 nested lists overflow its stack. 8 bytes that claim 4 GiB of text make it
//! abort.

use std::collections::HashMap;

/// Maximum number of entries that are searched by name in a dictionary. Larger dictionaries are
/// iterated once.
const MOST_NAMES: usize = 1 << 13;

type Id = u32;
type Read<T> = std::result::Result<T, String>;

enum Node<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(&'a str),
    /// Values that nothing here reads: bytes, text that is not UTF-8, integers of more than 64
    /// bits.
    Opaque,
    /// A list, a tuple or a set.
    Sequence(Vec<Id>),
    /// Keys and values, alternating.
    Dict(Vec<Id>),
    Global(&'a str, &'a str),
    Object(Box<Object>),
    /// A value outside the pickle, identified by this name.
    Persistent(Id),
}

/// A call of `class` with `arguments`, or an object made by it.
struct Object {
    class: Id,
    arguments: Id,
    state: Option<Id>,
    /// Items of a subclass of list or dict.
    items: Vec<Id>,
}

/// A pickle's values.
pub struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Id,
}

const NONE: Id = 0;
const TRUE: Id = 1;
const FALSE: Id = 2;
const EMPTY_TUPLE: Id = 3;

impl<'a> Pickle<'a> {
    /// Reads a pickle of protocol 2 to 5.
    ///
    /// # Errors
    /// If the bytes are not a pickle; the error names the position of the problem.
    pub fn parse(bytes: &'a [u8]) -> Read<Self> {
        let shared =
            vec![Node::None, Node::Bool(true), Node::Bool(false), Node::Sequence(Vec::new())];
        let mut reader = Reader {
            bytes,
            at: 0,
            nodes: shared,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        let root = reader
            .run()
            .map_err(|why| format!("is not a valid pickle: {why} at byte {}", reader.at))?;
        Ok(Self { nodes: reader.nodes, root })
    }

    pub fn root(&self) -> Value<'_> {
        Value { pickle: self, id: self.root }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node<'a>>,
    stack: Vec<Id>,
    /// Lengths of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Reader<'a> {
    fn run(&mut self) -> Read<Id> {
        if self.take(1)? != [0x80] || !(2..=5).contains(&self.byte()?) {
            return Err("it does not begin with protocol 2 to 5".into());
        }
        loop {
            match self.byte()? {
                b'.' => return self.pop(),
                opcode => self.step(opcode)?,
            }
        }
    }

    fn step(&mut self, opcode: u8) -> Read<()> {
        match opcode {
            0x95 => drop(self.take(8)?), // FRAME
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => self.stack.push(self.top()?),
            b'N' => self.stack.push(NONE),
            0x88 => self.stack.push(TRUE),
            0x89 => self.stack.push(FALSE),
            b')' => self.stack.push(EMPTY_TUPLE),
            b'J' => {
                let value = self.array().map(i32::from_le_bytes)?;
                self.push(Node::Int(value.into()))?;
            }
            b'K' => {
                let value = self.byte()?;
                self.push(Node::Int(value.into()))?;
            }
            b'M' => {
                let value = self.array().map(u16::from_le_bytes)?;
                self.push(Node::Int(value.into()))?;
            }
            b'G' => {
                let value = self.array().map(f64::from_be_bytes)?;
                self.push(Node::Float(value))?;
            }
            0x8a | 0x8b => {
                let length = if opcode == 0x8a { self.byte()? as usize } else { self.length4()? };
                let node = long(self.take(length)?);
                self.push(node)?;
            }
            b'X' | 0x8c | 0x8d => {
                let length = self.length(opcode, [0x8c, b'X', 0x8d])?;
                let text = std::str::from_utf8(self.take(length)?);
                self.push(text.map_or(Node::Opaque, Node::Str))?;
            }
            b'U' | b'T' | b'C' | b'B' | 0x8e | 0x96 => {
                let short = if opcode == b'U' { b'U' } else { b'C' };
                let middle = if opcode == b'T' { b'T' } else { b'B' };
                let length = self.length(opcode, [short, middle, opcode])?;
                self.take(length)?;
                self.push(Node::Opaque)?;
            }
            b']' | 0x8f => self.push(Node::Sequence(Vec::new()))?,
            b'}' => self.push(Node::Dict(Vec::new()))?,
            b'l' | b't' | 0x91 => {
                let items = self.pop_mark()?;
                self.push(Node::Sequence(items))?;
            }
            0x85..=0x87 => {
                let mut items = (0x85..=opcode).map(|_| self.pop()).collect::<Read<Vec<_>>>()?;
                items.reverse();
                self.push(Node::Sequence(items))?;
            }
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Node::Dict(even(items)?))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.extend(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend(vec![key, value])?;
            }
            b'u' => {
                let items = even(self.pop_mark()?)?;
                self.extend(items)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Node::Global(module, name))?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (&Node::Str(module), &Node::Str(name)) =
                    (&self.nodes[module as usize], &self.nodes[name as usize])
                else {
                    return Err("a class has no name".into());
                };
                self.push(Node::Global(module, name))?;
            }
            b'R' | 0x81 => {
                let (arguments, class) = (self.pop()?, self.pop()?);
                self.object(class, arguments)?;
            }
            0x92 => {
                let (_named, arguments, class) = (self.pop()?, self.pop()?, self.pop()?);
                self.object(class, arguments)?;
            }
            b'b' => {
                let (state, object) = (self.pop()?, self.top()?);
                let Node::Object(object) = &mut self.nodes[object as usize] else {
                    return Err("a state belongs to no object".into());
                };
                object.state = Some(state);
            }
            b'Q' => {
                let name = self.pop()?;
                self.push(Node::Persistent(name))?;
            }
            b'q' => {
                let index = self.byte()?;
                self.remember(index.into())?;
            }
            b'r' => {
                let index = self.array().map(u32::from_le_bytes)?;
                self.remember(index)?;
            }
            0x94 => self.remember(u32::try_from(self.memo.len()).map_err(|e| e.to_string())?)?,
            b'h' => {
                let index = self.byte()?;
                self.recall(index.into())?;
            }
            b'j' => {
                let index = self.array().map(u32::from_le_bytes)?;
                self.recall(index)?;
            }
            other => return Err(format!("opcode {other:#04x} is unknown")),
        }
        Ok(())
    }

    fn take(&mut self, length: usize) -> Read<&'a [u8]> {
        let taken =
            self.bytes.get(self.at..).and_then(|rest| rest.get(..length)).ok_or("it ends early")?;
        self.at += length;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| "it ends early".into())
    }

    fn byte(&mut self) -> Read<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn length4(&mut self) -> Read<usize> {
        Ok(self.array().map(u32::from_le_bytes)? as usize)
    }

    /// Reads a length of 1, 4 or 8 bytes, depending on the opcode.
    fn length(&mut self, opcode: u8, [one, four, _]: [u8; 3]) -> Read<usize> {
        match opcode {
            _ if opcode == one => Ok(self.byte()?.into()),
            _ if opcode == four => self.length4(),
            _ => usize::try_from(self.array().map(u64::from_le_bytes)?).map_err(|e| e.to_string()),
        }
    }

    fn line(&mut self) -> Read<&'a str> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|&byte| byte == b'\n').ok_or("it ends early")?;
        let line = self.take(length + 1)?;
        std::str::from_utf8(&line[..length]).map_err(|e| e.to_string())
    }

    /// Adds a new value. Python writes each value in at least two bytes. The limit here keeps
    /// memory proportional to the size of the file.
    fn push(&mut self, node: Node<'a>) -> Read<()> {
        if self.nodes.len() > self.bytes.len() / 2 + 8 {
            return Err("it has more values than its size allows".into());
        }
        self.stack.push(u32::try_from(self.nodes.len()).map_err(|e| e.to_string())?);
        self.nodes.push(node);
        Ok(())
    }

    fn object(&mut self, class: Id, arguments: Id) -> Read<()> {
        self.push(Node::Object(Box::new(Object {
            class,
            arguments,
            state: None,
            items: Vec::new(),
        })))
    }

    fn top(&self) -> Read<Id> {
        let bottom = self.marks.last().copied().unwrap_or(0);
        self.stack[bottom..].last().copied().ok_or_else(|| "a value is missing".into())
    }

    fn pop(&mut self) -> Read<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Read<Vec<Id>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    /// Adds items to the container on top of the stack.
    fn extend(&mut self, more: Vec<Id>) -> Read<()> {
        let container = self.top()?;
        match &mut self.nodes[container as usize] {
            // The empty tuple is shared, and a tuple cannot grow.
            Node::Sequence(items) if container != EMPTY_TUPLE => items.extend(more),
            Node::Dict(items) => items.extend(even(more)?),
            Node::Object(object) => object.items.extend(more),
            _ => return Err("items belong to no container".into()),
        }
        Ok(())
    }

    fn remember(&mut self, index: u32) -> Read<()> {
        // Each remembered value was created just before.
        if self.memo.len() > self.nodes.len() {
            return Err("it memoizes more values than it has".into());
        }
        self.memo.insert(index, self.top()?);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Read<()> {
        let id = self.memo.get(&index).ok_or_else(|| format!("value {index} was not memoized"))?;
        self.stack.push(*id);
        Ok(())
    }
}

fn even(items: Vec<Id>) -> Read<Vec<Id>> {
    if items.len().is_multiple_of(2) { Ok(items) } else { Err("a key has no value".into()) }
}

/// Decodes two's complement, little-endian.
fn long(bytes: &[u8]) -> Node<'static> {
    let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
    let mut wide = [if negative { 0xff } else { 0 }; 8];
    match wide.get_mut(..bytes.len()) {
        Some(low) => {
            low.copy_from_slice(bytes);
            Node::Int(i64::from_le_bytes(wide))
        }
        None => Node::Opaque,
    }
}

/// A value of a pickle. Accessors for another type return `None`.
#[derive(Clone, Copy)]
pub struct Value<'p> {
    pickle: &'p Pickle<'p>,
    id: Id,
}

impl<'p> Value<'p> {
    fn at(self, id: Id) -> Self {
        Self { id, ..self }
    }

    fn node(self) -> &'p Node<'p> {
        &self.pickle.nodes[self.id as usize]
    }

    pub fn is_none(self) -> bool {
        matches!(self.node(), Node::None)
    }

    pub fn bool(self) -> Option<bool> {
        if let Node::Bool(value) = self.node() { Some(*value) } else { None }
    }

    pub fn int(self) -> Option<i64> {
        if let Node::Int(value) = self.node() { Some(*value) } else { None }
    }

    /// A length, an offset or a count.
    pub fn size(self) -> Option<usize> {
        usize::try_from(self.int()?).ok()
    }

    /// An integer or a float.
    pub fn float(self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(*value),
            Node::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    pub fn str(self) -> Option<&'p str> {
        if let Node::Str(value) = self.node() { Some(value) } else { None }
    }

    /// The items of a list, a tuple or a set.
    pub fn items(self) -> Option<impl ExactSizeIterator<Item = Value<'p>>> {
        if let Node::Sequence(items) = self.node() {
            Some(items.iter().map(move |&id| self.at(id)))
        } else {
            None
        }
    }

    /// The item at `index` of a list or a tuple.
    pub fn item(self, index: usize) -> Option<Self> {
        if let Node::Sequence(items) = self.node() {
            items.get(index).map(|&id| self.at(id))
        } else {
            None
        }
    }

    /// Keys and values of a dictionary.
    pub fn entries(self) -> Option<impl ExactSizeIterator<Item = (Value<'p>, Value<'p>)>> {
        let Node::Dict(items) = self.node() else { return None };
        Some(items.chunks_exact(2).map(move |pair| (self.at(pair[0]), self.at(pair[1]))))
    }

    /// The last value for `key`, as in Python.
    pub fn get(self, key: &str) -> Option<Self> {
        let Node::Dict(items) = self.node() else { return None };
        let pairs = items.chunks_exact(2).take(MOST_NAMES);
        pairs.rev().find(|pair| self.at(pair[0]).str() == Some(key)).map(|pair| self.at(pair[1]))
    }

    /// The attribute `name` of an object whose state is a dictionary.
    pub fn attribute(self, name: &str) -> Option<Self> {
        self.state()?.get(name)
    }

    pub fn state(self) -> Option<Self> {
        if let Node::Object(object) = self.node() {
            object.state.map(|id| self.at(id))
        } else {
            None
        }
    }

    /// Module and name of a class or a function.
    pub fn global(self) -> Option<(&'p str, &'p str)> {
        if let Node::Global(module, name) = self.node() { Some((module, name)) } else { None }
    }

    /// The class of an object, or the function to be called.
    pub fn class(self) -> Option<(&'p str, &'p str)> {
        if let Node::Object(object) = self.node() { self.at(object.class).global() } else { None }
    }

    /// The tuple of its arguments.
    pub fn arguments(self) -> Option<Self> {
        if let Node::Object(object) = self.node() { Some(self.at(object.arguments)) } else { None }
    }

    pub fn persistent(self) -> Option<Self> {
        if let Node::Persistent(name) = self.node() { Some(self.at(*name)) } else { None }
    }

    /// A short description for messages.
    pub fn shown(self) -> String {
        match self.node() {
            Node::None => "None".into(),
            Node::Bool(value) => if *value { "True" } else { "False" }.into(),
            Node::Int(value) => value.to_string(),
            Node::Float(value) => value.to_string(),
            Node::Str(value) => format!("{:?}", value.chars().take(80).collect::<String>()),
            Node::Opaque => "bytes".into(),
            Node::Sequence(items) => format!("a list of {}", items.len()),
            Node::Dict(items) => format!("a dictionary of {}", items.len() / 2),
            Node::Global(module, name) => format!("{module}.{name}"),
            Node::Object(_) => match self.class() {
                Some((module, name)) => format!("an object of {module}.{name}"),
                None => "an object".into(),
            },
            Node::Persistent(_) => "a reference".into(),
        }
    }
}
