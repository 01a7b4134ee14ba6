//! Sizes in bytes as people write them.

use std::str::FromStr;

/// A number of bytes: `6GiB`, `512MiB`, `2.5g`, `1000000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteSize(pub(super) u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let number: f64 = number.parse().map_err(|_| format!("`{text}` is not a size"))?;
        let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1048576.0,
            "g" | "gib" => 1073741824.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            unit => return Err(format!("unknown unit `{unit}`, write MiB or GiB")),
        };
        let bytes = number * factor;
        if (1.0..1e18).contains(&bytes) {
            Ok(Self(bytes as u64))
        } else {
            Err(format!("`{text}` is out of range"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        let bytes = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        assert_eq!(bytes("6GiB"), Ok(6 << 30));
        assert_eq!(bytes("2.5g"), Ok(5 << 29));
        assert_eq!(bytes("512 MiB"), Ok(512 << 20));
        assert_eq!(bytes("1000"), Ok(1000));
        for wrong in ["", "GiB", "-1", "1e99", "3 bananas", "0"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(bytes("-5"), Err("`-5` is not a size".into()));
        assert_eq!(bytes("5 x"), Err("unknown unit `x`, write MiB or GiB".into()));
    }
}
