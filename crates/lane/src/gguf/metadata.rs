//! The key-value pairs of a GGUF header, kept as the bytes they are and viewed on demand.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use super::GgufError;
use super::header::HeaderReader;

/// Real files have a few dozen keys.
const MAX_KEYS: u64 = 1 << 16;
/// The longest key that the GGUF specification allows.
const MAX_KEY_BYTES: usize = (1 << 16) - 1;
/// No real file nests arrays at all.
const MAX_ARRAY_DEPTH: u32 = 4;

/// The type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the type of its name")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// The type with this number in GGUF.
    pub fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        const ALL: [ValueType; 13] =
            [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        ALL.get(id as usize).copied()
    }

    /// The number in GGUF.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of one value; `None` where it depends on the value.
    fn fixed_bytes(self) -> Option<u64> {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            String | Array => None,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ValueType::*;
        f.write_str(match self {
            U8 => "a u8",
            I8 => "an i8",
            U16 => "a u16",
            I16 => "an i16",
            U32 => "a u32",
            I32 => "an i32",
            F32 => "an f32",
            Bool => "a bool",
            String => "a string",
            Array => "an array",
            U64 => "a u64",
            I64 => "an i64",
            F64 => "an f64",
        })
    }
}

/// One metadata value. Integers and floats of every width come as the widest.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// Any of the unsigned integers.
    Unsigned(u64),
    /// Any of the signed integers.
    Signed(i64),
    /// An f32 or an f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string, which should be UTF-8 and need not be.
    String(&'a [u8]),
    /// An array.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Views `bytes`, which the header's check has found to hold one value of this type.
    fn view(ty: ValueType, bytes: &'a [u8]) -> Self {
        match ty {
            ValueType::String => Self::String(&bytes[8..]),
            ValueType::Array => Self::Array(Array::view(bytes)),
            _ => Self::fixed(ty, bytes),
        }
    }

    /// Views a value of a type with a fixed size.
    fn fixed(ty: ValueType, bytes: &[u8]) -> Self {
        match ty {
            ValueType::U8 => Self::Unsigned(u64::from(bytes[0])),
            ValueType::I8 => Self::Signed(i64::from(bytes[0].cast_signed())),
            ValueType::U16 => Self::Unsigned(u64::from(u16::from_le_bytes(le(bytes)))),
            ValueType::I16 => Self::Signed(i64::from(i16::from_le_bytes(le(bytes)))),
            ValueType::U32 => Self::Unsigned(u64::from(u32::from_le_bytes(le(bytes)))),
            ValueType::I32 => Self::Signed(i64::from(i32::from_le_bytes(le(bytes)))),
            ValueType::U64 => Self::Unsigned(u64::from_le_bytes(le(bytes))),
            ValueType::I64 => Self::Signed(i64::from_le_bytes(le(bytes))),
            ValueType::F32 => Self::Float(f64::from(f32::from_le_bytes(le(bytes)))),
            ValueType::F64 => Self::Float(f64::from_le_bytes(le(bytes))),
            ValueType::Bool => Self::Bool(bytes[0] != 0),
            ValueType::String | ValueType::Array => unreachable!("sizes of these vary"),
        }
    }

    fn integer(self) -> Option<i128> {
        match self {
            Self::Unsigned(value) => Some(i128::from(value)),
            Self::Signed(value) => Some(i128::from(value)),
            _ => None,
        }
    }
}

/// The first `N` bytes, which the caller knows to be there.
fn le<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes[..N].try_into().expect("the header's check saw these bytes")
}

/// An array in the metadata: a view of the header's bytes.
#[derive(Clone, Copy)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    fn view(bytes: &'a [u8]) -> Self {
        let element = ValueType::from_id(u32::from_le_bytes(le(bytes)))
            .expect("the header's check saw this type");
        // The check compared it with the length of the header, which is in memory.
        let len = u64::from_le_bytes(le(&bytes[4..])) as usize;
        Self { element, len, bytes: &bytes[12..] }
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, if they are strings.
    pub fn byte_strings(&self) -> Option<ByteStrings<'a>> {
        (self.element == ValueType::String)
            .then_some(ByteStrings { bytes: self.bytes, left: self.len })
    }

    /// The elements, if they are integers of any width.
    pub fn integers(&self) -> Option<impl ExactSizeIterator<Item = i128> + Clone + use<'a>> {
        use ValueType::*;
        matches!(self.element, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
            .then(|| self.fixed().map(|value| value.integer().expect("an integer type")))
    }

    /// The elements, if they are floats.
    pub fn floats(&self) -> Option<impl ExactSizeIterator<Item = f64> + Clone + use<'a>> {
        matches!(self.element, ValueType::F32 | ValueType::F64).then(|| {
            self.fixed().map(|value| match value {
                Value::Float(value) => value,
                _ => unreachable!("a float type"),
            })
        })
    }

    fn fixed(&self) -> impl ExactSizeIterator<Item = Value<'a>> + Clone + use<'a> {
        let element = self.element;
        let size = element.fixed_bytes().expect("a type of fixed size") as usize;
        self.bytes.chunks_exact(size).map(move |bytes| Value::fixed(element, bytes))
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:?}; {}]", self.element, self.len)
    }
}

/// The elements of an array of strings, as bytes.
#[derive(Clone, Debug)]
pub struct ByteStrings<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl<'a> Iterator for ByteStrings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        let n_bytes = u64::from_le_bytes(le(self.bytes)) as usize;
        let (string, rest) = self.bytes[8..].split_at(n_bytes);
        self.bytes = rest;
        Some(string)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for ByteStrings<'_> {}

/// The elements of an array of strings that are all UTF-8.
#[derive(Clone, Debug)]
pub struct Strings<'a>(ByteStrings<'a>);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.0.next().map(|s| str::from_utf8(s).expect("checked when the iterator was made"))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Strings<'_> {}

/// The key-value pairs of a GGUF.
///
/// The getters answer `Ok(None)` where the key is absent and an error where it is there with
/// another type; an integer is taken from whatever width the file stores it in.
#[derive(Debug)]
pub struct Metadata {
    header: Cow<'static, [u8]>,
    entries: Vec<Entry>,
    by_key: HashMap<Box<str>, usize>,
}

#[derive(Debug)]
struct Entry {
    key: Range<usize>,
    ty: ValueType,
    value: Range<usize>,
}

/// The places of the key-value pairs in a header that is still being read.
pub(super) struct Index {
    entries: Vec<Entry>,
    by_key: HashMap<Box<str>, usize>,
}

impl Index {
    /// Goes over `count` key-value pairs, checking each.
    pub(super) fn read(header: &mut HeaderReader<'_>, count: u64) -> Result<Self, GgufError> {
        // Key length, one byte of key, type, one byte of value.
        header.check_count("metadata keys", count, 8 + 1 + 4 + 1, MAX_KEYS)?;
        let mut index = Self { entries: Vec::new(), by_key: HashMap::new() };
        for _ in 0..count {
            let offset_bytes = header.position() as u64;
            let key = checked_name(header.string("a metadata key")?, MAX_KEY_BYTES)
                .map_err(|problem| GgufError::BadKey { offset_bytes, problem })?;
            let key_end = header.position();
            let ty = value_type(header, &key)?;
            let start = header.position();
            skip_value(header, ty, &key, 0)?;
            let entry =
                Entry { key: key_end - key.len()..key_end, ty, value: start..header.position() };
            if index.by_key.insert(key.clone(), index.entries.len()).is_some() {
                return Err(GgufError::DuplicateKey { key: key.into() });
            }
            index.entries.push(entry);
        }
        Ok(index)
    }

    /// Joins the places with the header they are in.
    pub(super) fn over(self, header: Cow<'static, [u8]>) -> Metadata {
        Metadata { header, entries: self.entries, by_key: self.by_key }
    }
}

/// A name of 1 to `most_bytes` bytes of UTF-8, or what it is instead.
pub(super) fn checked_name(bytes: &[u8], most_bytes: usize) -> Result<Box<str>, &'static str> {
    if bytes.is_empty() {
        return Err("empty");
    }
    if bytes.len() > most_bytes {
        return Err("longer than GGUF allows");
    }
    str::from_utf8(bytes).map(Into::into).map_err(|_| "not valid UTF-8")
}

fn value_type(header: &mut HeaderReader<'_>, key: &str) -> Result<ValueType, GgufError> {
    let type_id = header.u32("the type of a metadata value")?;
    ValueType::from_id(type_id)
        .ok_or_else(|| GgufError::UnknownValueType { key: key.to_owned(), type_id })
}

/// Goes past one value; afterwards all its lengths are known to be right.
fn skip_value(
    header: &mut HeaderReader<'_>,
    ty: ValueType,
    key: &str,
    depth: u32,
) -> Result<(), GgufError> {
    if let Some(n_bytes) = ty.fixed_bytes() {
        header.take("a metadata value", n_bytes)?;
        return Ok(());
    }
    if ty == ValueType::String {
        header.string("a metadata string")?;
        return Ok(());
    }
    if depth == MAX_ARRAY_DEPTH {
        return Err(GgufError::NestedTooDeep { key: key.to_owned(), limit: MAX_ARRAY_DEPTH });
    }
    let element = value_type(header, key)?;
    let len = header.u64("a metadata array")?;
    // An empty string takes 8 bytes, an empty array 12.
    let least_bytes = element.fixed_bytes().unwrap_or(8);
    header.check_count("array elements", len, least_bytes, u64::MAX)?;
    if let Some(n_bytes) = element.fixed_bytes() {
        // No overflow: the check above found this many bytes in the file.
        header.take("a metadata array", len * n_bytes)?;
        return Ok(());
    }
    for _ in 0..len {
        skip_value(header, element, key, depth + 1)?;
    }
    Ok(())
}

impl Metadata {
    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every key with its type and value, in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, ValueType, Value<'_>)> {
        self.entries.iter().map(|entry| {
            let key = str::from_utf8(&self.header[entry.key.clone()]).expect("checked on reading");
            (key, entry.ty, self.value(entry))
        })
    }

    /// Whether the key is there, whatever its type.
    pub fn contains(&self, key: &str) -> bool {
        self.by_key.contains_key(key)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.entry(key).map(|entry| self.value(entry))
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", |value| match value {
            Value::String(bytes) => Some(bytes),
            _ => None,
        })?
        .map(|bytes| str::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 { key: key.to_owned() }))
        .transpose()
    }

    /// An integer of any width that fits a u32.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.integer(key, "a 32-bit unsigned integer")
    }

    /// An integer of any width that fits a u64.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.integer(key, "a 64-bit unsigned integer")
    }

    /// An integer of any width that fits an i64.
    pub fn i64(&self, key: &str) -> Result<Option<i64>, GgufError> {
        self.integer(key, "a 64-bit signed integer")
    }

    /// A float of either width, or an integer.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.typed(key, "a number", |value| match value {
            Value::Float(value) => Some(value),
            value => value.integer().map(|value| value as f64),
        })
    }

    /// A float of either width, or an integer, rounded to f32.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        Ok(self.f64(key)?.map(|value| value as f32))
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(value) => Some(value),
            _ => None,
        })
    }

    /// An array of any element type.
    pub fn array(&self, key: &str) -> Result<Option<Array<'_>>, GgufError> {
        self.typed(key, "an array", |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })
    }

    /// An array of strings that must be UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Strings<'_>>, GgufError> {
        let Some(strings) = self.byte_strings(key)? else { return Ok(None) };
        if strings.clone().any(|string| str::from_utf8(string).is_err()) {
            return Err(GgufError::NotUtf8 { key: key.to_owned() });
        }
        Ok(Some(Strings(strings)))
    }

    /// An array of strings as the bytes they are.
    pub fn byte_strings(&self, key: &str) -> Result<Option<ByteStrings<'_>>, GgufError> {
        self.elements(key, "an array of strings", Array::byte_strings)
    }

    /// An array of integers of any width that all fit an i32.
    pub fn i32s(
        &self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = i32> + use<'_>>, GgufError> {
        self.integers(key, "32-bit signed integers")
    }

    /// An array of integers of any width that all fit a u32.
    pub fn u32s(
        &self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = u32> + use<'_>>, GgufError> {
        self.integers(key, "32-bit unsigned integers")
    }

    /// An array of floats of either width, rounded to f32.
    pub fn f32s(
        &self,
        key: &str,
    ) -> Result<Option<impl ExactSizeIterator<Item = f32> + use<'_>>, GgufError> {
        let floats = self.elements(key, "an array of floats", Array::floats)?;
        Ok(floats.map(|floats| floats.map(|value| value as f32)))
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        self.by_key.get(key).map(|&index| &self.entries[index])
    }

    fn value(&self, entry: &Entry) -> Value<'_> {
        Value::view(entry.ty, &self.header[entry.value.clone()])
    }

    /// The value of a key where `pick` takes it, which it must if the key is there.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        pick: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(entry) = self.entry(key) else { return Ok(None) };
        match pick(self.value(entry)) {
            Some(value) => Ok(Some(value)),
            None => Err(GgufError::WrongType { key: key.to_owned(), expected, found: entry.ty }),
        }
    }

    fn integer<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.typed(key, expected, Value::integer)? else { return Ok(None) };
        match T::try_from(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(GgufError::OutOfRange { key: key.to_owned(), value, expected }),
        }
    }

    fn elements<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        pick: impl FnOnce(&Array<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        match pick(&array) {
            Some(elements) => Ok(Some(elements)),
            None => Err(GgufError::WrongType {
                key: key.to_owned(),
                expected,
                found: array.element_type(),
            }),
        }
    }

    fn integers<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Option<impl ExactSizeIterator<Item = T> + use<'_, T>>, GgufError> {
        let Some(integers) = self.elements(key, expected, Array::integers)? else {
            return Ok(None);
        };
        if let Some(value) = integers.clone().find(|&value| T::try_from(value).is_err()) {
            return Err(GgufError::OutOfRange { key: key.to_owned(), value, expected });
        }
        Ok(Some(integers.map(|value| T::try_from(value).ok().expect("checked above"))))
    }
}
