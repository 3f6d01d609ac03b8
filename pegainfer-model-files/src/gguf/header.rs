//! The header of a GGUF file, version 3: `GGUF`, version, counts, key-value pairs, and the tensor table.

use super::header_error::HeaderError;
use super::metadata::Metadata;
use super::reader::{Reader, shown};
use super::tensor_type::TensorType;
use super::value::Value;
use std::collections::HashSet;
use std::io::{ErrorKind, Read};

const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
/// Key of the model family.
pub(super) const ARCHITECTURE: &str = "general.architecture";
/// Maximum number of key-value pairs; files have about 50.
const MAX_PAIRS: u64 = 1 << 16;
/// Maximum number of tensors; the largest models have about 3,000.
const MAX_TENSORS: u64 = 1 << 20;
/// Maximum length of a key, as in the format's description.
const MAX_KEY: u64 = 65_535;
/// Maximum length of a tensor's name, as in the format's description.
const MAX_NAME: u64 = 63;
/// Maximum number of dimensions.
const MAX_DIMENSIONS: u32 = 4;
/// Alignment of tensors unless the metadata has another one, in bytes.
const ALIGNMENT: u64 = 32;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Shape, outermost dimension first; the last dimension is a whole number of blocks.
    pub shape: Vec<usize>,
    /// Element type.
    pub kind: TensorType,
    /// Offset of the first byte in the file.
    pub start: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

/// The header of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// Key-value pairs.
    pub metadata: Metadata,
    /// Tensors in the order of the file; their data does not overlap and lies inside the file.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads the header at the beginning of a file of `file_bytes` bytes.
    ///
    /// Memory stays within a small multiple of the header's own size. Lengths and counts are checked against the bytes
    /// that are left before anything is allocated for them.
    pub fn read(input: impl Read, file_bytes: u64) -> Result<Self, HeaderError> {
        let mut input = Reader::new(input, file_bytes);
        let (tensors, pairs) = read_counts(&mut input)?;
        let metadata = read_metadata(&mut input, pairs)?;
        let entries = (0..tensors).map(|_| Entry::read(&mut input)).collect::<Result<Vec<_>, _>>()?;
        let alignment = alignment(&metadata)?;
        let start = input.position().checked_next_multiple_of(alignment);
        let start = start.ok_or_else(|| HeaderError::invalid("its data begins beyond its end"))?;
        let tensors = place(entries, start, alignment, file_bytes)?;
        Ok(Self { metadata, tensors })
    }

    /// Reads `general.architecture` of a file of `file_bytes` bytes, usually its first pair. `None` if `input` ends
    /// before.
    pub fn architecture(input: impl Read, file_bytes: u64) -> Result<Option<String>, HeaderError> {
        let found = || -> Result<Option<String>, HeaderError> {
            let mut input = Reader::new(input, file_bytes);
            let (_, pairs) = read_counts(&mut input)?;
            for _ in 0..pairs {
                let key = input.name(MAX_KEY, "a metadata key")?;
                let value = Value::read(&mut input, &shown(&key))?;
                if key == ARCHITECTURE {
                    return Ok(value.text());
                }
            }
            Ok(None)
        };
        match found() {
            Err(HeaderError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
            found => found,
        }
    }
}

/// Reads the magic number and version. Returns the number of tensors and of metadata pairs.
fn read_counts(input: &mut Reader<impl Read>) -> Result<(u64, u64), HeaderError> {
    if input.array()? != MAGIC {
        return Err(HeaderError::invalid("it does not begin with GGUF"));
    }
    match input.u32()? {
        VERSION => {}
        version if version.swap_bytes() == VERSION => {
            return Err(HeaderError::Unsupported("it is a big-endian GGUF file, and little-endian is read".into()));
        }
        version => {
            return Err(HeaderError::Unsupported(format!("it is GGUF version {version}, and version 3 is read")));
        }
    }
    let (tensors, pairs) = (input.u64()?, input.u64()?);
    if tensors > MAX_TENSORS || pairs > MAX_PAIRS {
        return Err(HeaderError::invalid(format!("it announces {tensors} tensors and {pairs} metadata pairs")));
    }
    Ok((tensors, pairs))
}

fn read_metadata(input: &mut Reader<impl Read>, pairs: u64) -> Result<Metadata, HeaderError> {
    let mut metadata = Metadata::default();
    for _ in 0..pairs {
        let key = input.name(MAX_KEY, "a metadata key")?;
        let value = Value::read(input, &shown(&key))?;
        if metadata.get(&key).is_some() {
            return Err(HeaderError::invalid(format!("it has the metadata key {} twice", shown(&key))));
        }
        metadata.0.insert(key, value);
    }
    Ok(metadata)
}

/// A power of two.
fn alignment(metadata: &Metadata) -> Result<u64, HeaderError> {
    let alignment = metadata.unsigned("general.alignment").map_err(HeaderError::Invalid)?.unwrap_or(ALIGNMENT);
    match alignment.is_power_of_two() {
        true => Ok(alignment),
        false => Err(HeaderError::invalid(format!("general.alignment is {alignment}, and must be a power of two"))),
    }
}

/// An entry of the tensor table.
struct Entry {
    name: String,
    /// Outermost first.
    shape: Vec<usize>,
    kind: TensorType,
    bytes: u64,
    /// From the beginning of the data.
    offset: u64,
}

impl Entry {
    fn read(input: &mut Reader<impl Read>) -> Result<Self, HeaderError> {
        let name = input.name(MAX_NAME, "the name of a tensor")?;
        let invalid = |message: String| HeaderError::invalid(format!("tensor {} {message}", shown(&name)));
        let dimensions = input.u32()?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(invalid(format!("has {dimensions} dimensions")));
        }
        let sizes = (0..dimensions).map(|_| input.u64()).collect::<Result<Vec<_>, _>>()?;
        let id = input.u32()?;
        let kind = TensorType::from_id(id).ok_or_else(|| invalid(format!("has the unknown type {id}")))?;
        let offset = input.u64()?;
        let elements = sizes.iter().try_fold(1u64, |count, size| count.checked_mul(*size));
        let elements = elements.filter(|elements| *elements > 0 && i64::try_from(*elements).is_ok());
        let elements = elements.ok_or_else(|| invalid(format!("has the impossible sizes {sizes:?}")))?;
        let (values, block) = (kind.block_values() as u64, kind.block_bytes() as u64);
        if !sizes[0].is_multiple_of(values) {
            let row = sizes[0];
            return Err(invalid(format!("has rows of {row} elements, and {kind} stores {values} at a time")));
        }
        let bytes = (elements / values).checked_mul(block);
        let bytes = bytes.ok_or_else(|| invalid(format!("has the impossible sizes {sizes:?}")))?;
        let shape = sizes.iter().rev().map(|size| usize::try_from(*size));
        let shape = shape.collect::<Result<_, _>>().map_err(|_| invalid("is too large for this machine".into()))?;
        Ok(Self { name, shape, kind, bytes, offset })
    }
}

/// Places the tensors in the file. Their names are unique, and their data lies in order and inside the file.
fn place(entries: Vec<Entry>, start: u64, alignment: u64, file_bytes: u64) -> Result<Vec<TensorInfo>, HeaderError> {
    let mut names = HashSet::new();
    let mut free = start;
    let mut tensors = Vec::with_capacity(entries.len());
    for Entry { name, shape, kind, bytes, offset } in entries {
        let invalid = |message: String| HeaderError::invalid(format!("tensor {} {message}", shown(&name)));
        if !names.insert(name.clone()) {
            return Err(invalid("is there twice".into()));
        }
        let first = start.checked_add(offset).filter(|first| offset.is_multiple_of(alignment) && *first >= free);
        let first = first.ok_or_else(|| invalid(format!("has the impossible offset {offset}")))?;
        let end = first.checked_add(bytes).filter(|end| *end <= file_bytes);
        free = end.ok_or_else(|| {
            invalid(format!("has {bytes} bytes at byte {first}, and the file has {file_bytes} bytes"))
        })?;
        tensors.push(TensorInfo { name, shape, kind, start: first, bytes });
    }
    Ok(tensors)
}
