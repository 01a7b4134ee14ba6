//! What it costs that some types are loaded as others.

use std::fmt;

use q4k_soa::TranscodedType;

use super::Model;

/// The matrices of a model that are not computed with as they are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transcoding {
    /// How many there are.
    pub n_matrices: usize,
    /// Their types, each once.
    pub types: Vec<TranscodedType>,
    /// Their bytes in the file.
    pub stored_bytes: u64,
    /// Their bytes as they are computed with.
    pub resident_bytes: u64,
}

impl Model {
    /// What is transcoded when the model is loaded, if anything is.
    pub fn transcoding(&self) -> Option<Transcoding> {
        let mut found =
            Transcoding { n_matrices: 0, types: Vec::new(), stored_bytes: 0, resident_bytes: 0 };
        for matrix in self.matrices() {
            let Some(ty) = matrix.stored_as else { continue };
            found.n_matrices += 1;
            found.types.push(ty);
            found.stored_bytes += matrix.n_bytes();
            found.resident_bytes += matrix.resident_bytes();
        }
        found.types.sort_unstable();
        found.types.dedup();
        (found.n_matrices > 0).then_some(found)
    }
}

impl fmt::Display for Transcoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types: Vec<_> = self.types.iter().map(|ty| ty.name()).collect();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{} matrices of {} become {}: {:.1} MiB instead of {:.1}",
            self.n_matrices,
            types.join(", "),
            TranscodedType::TARGET,
            mib(self.resident_bytes),
            mib(self.stored_bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_is_one_line_with_numbers() {
        let cost = Transcoding {
            n_matrices: 13,
            types: vec![TranscodedType::Q3K, TranscodedType::Iq4Nl],
            stored_bytes: 110 << 20,
            resident_bytes: 272 << 20,
        };
        let line = "13 matrices of Q3_K, IQ4_NL become Q8_0: 272.0 MiB instead of 110.0";
        assert_eq!(cost.to_string(), line);
    }
}
