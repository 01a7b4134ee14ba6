//! The types in which keys and values can be kept.

use crate::KvError;
use alloc::string::ToString;
use core::{fmt, str::FromStr};

/// How one element of a key or value is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum KvType {
    /// IEEE single, 4 bytes.
    F32,
    /// IEEE half, 2 bytes.
    #[default]
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
    /// 8-bit float of 4 exponent and 3 mantissa bits (OCP E4M3), 1 byte, without a scale.
    Fp8E4m3,
    /// `i8` with one `f32` scale per head and token: element = scale x integer.
    Q8,
}

impl KvType {
    /// Every type, in declaration order.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Fp8E4m3, Self::Q8];

    /// The name used on command lines and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8",
            Self::Q8 => "q8",
        }
    }

    /// The type of that [`name`](Self::name); `fp8_e4m3` is accepted for [`Fp8E4m3`](Self::Fp8E4m3).
    pub fn parse(name: &str) -> Result<Self, KvError> {
        if name == "fp8_e4m3" {
            return Ok(Self::Fp8E4m3);
        }
        Self::ALL
            .into_iter()
            .find(|t| t.name() == name)
            .ok_or_else(|| KvError::UnknownKvType { name: name.to_string() })
    }

    /// Bytes of one element, without its share of a scale.
    pub const fn elem_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Q8 => 1,
        }
    }

    /// Bytes of the scale that each (K or V, head, token) carries; 0 for the types without one.
    pub const fn scale_bytes(self) -> u64 {
        match self {
            Self::Q8 => 4,
            _ => 0,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvType {
    type Err = KvError;

    fn from_str(name: &str) -> Result<Self, KvError> {
        Self::parse(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back() {
        for kv_type in KvType::ALL {
            assert_eq!(KvType::parse(kv_type.name()), Ok(kv_type));
        }
        assert_eq!("fp8_e4m3".parse(), Ok(KvType::Fp8E4m3));
    }

    #[test]
    fn an_unknown_name_is_quoted_back() {
        let error = KvType::parse("f64").unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown KV type \"f64\", expected f32, f16, bf16, fp8 or q8"
        );
    }
}
