//! Writes GGUF files for tests.

/// A value of metadata.
#[derive(Debug, Clone)]
pub enum Value {
    /// u32.
    Unsigned(u32),
    /// f32.
    Float(f32),
    /// A boolean.
    Flag(bool),
    /// A text.
    Text(String),
    /// An array of texts.
    Texts(Vec<String>),
    /// An array of i32.
    Integers(Vec<i32>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Unsigned(value)
    }
}

impl From<f32> for Value {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// A tensor: name, shape (outermost first), type id, and bytes.
type Tensor = (String, Vec<usize>, u32, Vec<u8>);

/// A file under construction.
#[derive(Debug, Clone, Default)]
pub struct Writer {
    pairs: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

impl Writer {
    /// Adds a key-value pair.
    pub fn pair(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.pairs.push((key.to_owned(), value.into()));
        self
    }

    /// Adds a tensor of the type with this id; `shape` is outermost first.
    pub fn tensor(&mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) -> &mut Self {
        self.tensors.push((name.to_owned(), shape.to_vec(), kind, bytes));
        self
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            text(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0u64;
        for (name, shape, kind, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|size| out.extend((*size as u64).to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let mut tagged = |tag: u32, bytes: &[u8]| {
        out.extend(tag.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::Unsigned(value) => tagged(4, &value.to_le_bytes()),
        Value::Float(value) => tagged(6, &value.to_le_bytes()),
        Value::Flag(value) => tagged(7, &[u8::from(*value)]),
        Value::Text(value) => {
            tagged(8, &[]);
            text(out, value);
        }
        Value::Texts(values) => {
            tagged(9, &8u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| text(out, value));
        }
        Value::Integers(values) => {
            tagged(9, &5u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}
