//! One launch of a kernel, and the list of them that makes a step.

use gpu_slab::{DeviceMemory, Slab, SlabError, View};
use kernels_ptx::{Access, Arg, ArgList, Geometry, Kernel, ParamKind};

/// Where in the step a launch stands, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Label {
    /// Layer, for launches inside one.
    pub layer: Option<u32>,
    /// What it computes, in the model's words.
    pub what: &'static str,
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "layer {layer} {}", self.what),
            None => f.write_str(self.what),
        }
    }
}

/// A kernel with geometry and arguments. `B` is a [`View`] while recording and a [`ByteRange`]
/// once bound to a slab.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch<B = View> {
    /// Kernel.
    pub kernel: Kernel,
    /// Grid, block, shared memory.
    pub geometry: Geometry,
    /// Arguments in the order of the signature.
    pub args: ArgList<B>,
    /// Place in the step.
    pub label: Label,
}

impl<B> Launch<B> {
    /// The buffers with their access, in the order of the signature.
    pub fn buffers(&self) -> impl Iterator<Item = (&'static str, Access, &B)> {
        self.args.iter().zip(self.kernel.params()).filter_map(|(arg, param)| {
            match (arg, param.kind) {
                (Arg::Buffer(buffer), ParamKind::Buffer { access, .. }) => {
                    Some((param.name, access, buffer))
                }
                _ => None,
            }
        })
    }
}

/// Bytes of a slab, relative to its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte.
    pub offset_bytes: u64,
    /// Length.
    pub len_bytes: u64,
}

impl ByteRange {
    /// One past the last byte.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.len_bytes
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.offset_bytes < other.end_bytes() && other.offset_bytes < self.end_bytes()
    }
}

/// Why launches cannot be bound to a slab.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// A view is stale or of another slab.
    #[error("{label}, {kernel}: argument `{param}`: {source}")]
    View {
        /// Place in the step.
        label: Label,
        /// Kernel.
        kernel: &'static str,
        /// Parameter.
        param: &'static str,
        /// What the slab said.
        source: SlabError,
    },
    /// A buffer that the kernel writes overlaps another of its buffers.
    #[error("{label}, {kernel}: `{written}` is written and overlaps `{other}`")]
    Overlap {
        /// Place in the step.
        label: Label,
        /// Kernel.
        kernel: &'static str,
        /// Parameter that is written.
        written: &'static str,
        /// Parameter that it overlaps.
        other: &'static str,
    },
}

impl Launch<View> {
    /// Resolves the views against `slab`, and checks that nothing the kernel writes overlaps
    /// anything else it uses: on a GPU that is a race, and the host could not lend the slices.
    pub fn bind<M: DeviceMemory>(&self, slab: &Slab<M>) -> Result<Launch<ByteRange>, BindError> {
        let (label, kernel) = (self.label, self.kernel.name());
        let mut args = Vec::with_capacity(self.args.len());
        for (arg, param) in self.args.iter().zip(self.kernel.params()) {
            let bound = (*arg).try_map(|view| {
                let range = slab.resolve(view).map_err(|source| BindError::View {
                    label,
                    kernel,
                    param: param.name,
                    source,
                })?;
                Ok(ByteRange { offset_bytes: range.start, len_bytes: range.end - range.start })
            })?;
            args.push(bound);
        }
        let launch = Launch { kernel: self.kernel, geometry: self.geometry, args, label };
        for (written, access, range) in launch.buffers() {
            if access == Access::Read {
                continue;
            }
            let others = launch.buffers().filter(|(name, ..)| *name != written);
            if let Some((other, ..)) = others.into_iter().find(|(_, _, r)| r.overlaps(range)) {
                return Err(BindError::Overlap { label, kernel, written, other });
            }
        }
        Ok(launch)
    }
}
