//! Why a sound GGUF is not a model that can be run.

use crate::gguf::GgufError;

/// Why a model was refused. Every message is one sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file itself is at fault.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A model of a kind that is not supported.
    #[error("the architecture {name:?} is not supported; supported: {supported}")]
    UnsupportedArchitecture {
        /// What the file says it is.
        name: String,
        /// The names of those that are, separated by commas.
        supported: String,
    },
    /// A metadata key that the architecture needs is absent.
    #[error("the metadata key {key:?} is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value that no model can have, or that contradicts another.
    #[error("the metadata key {key:?} is {value}; {expected}")]
    BadValue {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// The model uses something that the engine does not do.
    #[error("the model uses {feature}, which is not supported")]
    UnsupportedFeature {
        /// What it is, with its number where it has one.
        feature: String,
    },
    /// A tensor that the architecture needs is absent.
    #[error("the tensor {tensor:?} is missing")]
    MissingTensor {
        /// Its name.
        tensor: String,
    },
    /// A tensor whose shape contradicts the header.
    #[error(
        "the tensor {tensor:?} has the shape {found:?}; by the header it should be {expected:?}"
    )]
    WrongShape {
        /// Its name.
        tensor: String,
        /// Its dimensions, the contiguous one first.
        found: Vec<u64>,
        /// What the header makes them.
        expected: Vec<u64>,
    },
    /// A tensor of a type that the engine does not compute with.
    #[error(
        "the tensor {tensor:?} is of type {found}, which is not supported; supported: {supported}"
    )]
    UnsupportedType {
        /// Its name.
        tensor: String,
        /// Its type's name.
        found: &'static str,
        /// The names of those that are, separated by commas.
        supported: String,
    },
    /// A tensor that changes what the model computes, in a way the engine does not.
    #[error("the tensor {tensor:?} would change the result and is not supported")]
    UnsupportedTensor {
        /// Its name.
        tensor: String,
    },
}
