//! How kernels declare their parameters, and how arguments are checked against them.
//!
//! A kernel's parameter list is written once, with [`kernel_params!`], in the file of its
//! operation. From it come the recorded form ([`ArgList`]), the signature that the PTX must
//! have ([`Param`]), the size check of every buffer, and the typed slices its twin works on.

use bytemuck::Pod;

use crate::table::Kernel;

/// Most parameters any kernel takes; lets argument lists live on the stack.
pub const MAX_PARAMS: usize = 28;

/// What a kernel does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes every element that its shape names, reads none.
    Write,
    /// Reads and writes parts of it.
    Update,
}

/// Element type of a buffer, as the CUDA source spells it behind the pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// Raw bytes: packed weights, the KV arena.
    U8,
    /// Quantised activations.
    I8,
    /// Ids, positions, table entries.
    U32,
    /// Activations of matrix products on tensor cores, `u16` in CUDA.
    F16,
    /// Activations, norm weights, logits.
    F32,
    /// Rope frequencies.
    F64,
    /// [`q4k_soa::Q8Group`], `float2` in CUDA.
    Q8Group,
    /// [`crate::Candidate`], `{ float value; unsigned index; }` in CUDA.
    Candidate,
    /// [`crate::SamplingPack`].
    SamplingPack,
}

/// Type of a scalar parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScalarType {
    /// 32-bit unsigned.
    U32,
    /// 32-bit float.
    F32,
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// A device address.
    Buffer {
        /// How it is used.
        access: Access,
        /// What it points to.
        elem: Elem,
        /// Whether null is allowed.
        optional: bool,
    },
    /// A value.
    Scalar(ScalarType),
}

/// One parameter of a kernel, in the order of the CUDA signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Param {
    /// Name, the same in the CUDA source.
    pub name: &'static str,
    /// What it is.
    pub kind: ParamKind,
    /// Number of elements, as an expression over the scalar parameters; empty for scalars.
    pub shape: &'static str,
}

/// One argument of a launch. `B` is whatever stands for a buffer: a view of a slab while
/// recording, a slice while a twin runs, an address on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg<B> {
    /// A buffer.
    Buffer(B),
    /// The null pointer, for optional buffers.
    Null,
    /// A 32-bit value.
    U32(u32),
    /// A 32-bit float.
    F32(f32),
}

impl<B> Arg<B> {
    /// The same argument over another kind of buffer.
    pub fn try_map<C, E>(self, f: impl FnOnce(B) -> Result<C, E>) -> Result<Arg<C>, E> {
        Ok(match self {
            Arg::Buffer(buffer) => Arg::Buffer(f(buffer)?),
            Arg::Null => Arg::Null,
            Arg::U32(value) => Arg::U32(value),
            Arg::F32(value) => Arg::F32(value),
        })
    }
}

/// The arguments of one launch, in the order of the signature, each buffer long enough.
pub type ArgList<B> = Vec<Arg<B>>;

/// A slice of memory as a twin sees it.
#[derive(Debug)]
pub enum Slice<'a> {
    /// Of a parameter that is only read.
    Shared(&'a [u8]),
    /// Of a parameter that is written or updated.
    Exclusive(&'a mut [u8]),
}

/// The arguments of a twin. Lives on the stack: a replay allocates nothing.
pub struct TwinArgs<'a> {
    args: [Option<Arg<Slice<'a>>>; MAX_PARAMS],
    len: usize,
}

impl<'a> TwinArgs<'a> {
    /// No arguments yet.
    pub fn new() -> Self {
        Self { args: [const { None }; MAX_PARAMS], len: 0 }
    }

    /// Appends the next argument of the signature.
    ///
    /// # Panics
    /// Beyond [`MAX_PARAMS`]: no kernel of the table has more.
    pub fn push(&mut self, arg: Arg<Slice<'a>>) {
        self.args[self.len] = Some(arg);
        self.len += 1;
    }

    pub(crate) fn take(&mut self, index: usize) -> Option<Arg<Slice<'a>>> {
        self.args.get_mut(index)?.take()
    }
}

impl Default for TwinArgs<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// An argument that does not fit the signature.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// A buffer is shorter than its shape.
    #[error(
        "{kernel}: argument `{param}` needs {needed_bytes} bytes, the buffer has {found_bytes}"
    )]
    ShortBuffer {
        /// Kernel.
        kernel: &'static str,
        /// Parameter.
        param: &'static str,
        /// Bytes of the shape.
        needed_bytes: u64,
        /// Bytes of the buffer.
        found_bytes: u64,
    },
    /// The argument is missing, or of another kind than the signature says.
    #[error("{kernel}: argument `{param}` is missing or of another kind than the signature says")]
    Mismatch {
        /// Kernel.
        kernel: &'static str,
        /// Parameter.
        param: &'static str,
    },
    /// A buffer's address is not a multiple of its element's alignment.
    #[error("{kernel}: argument `{param}` is not aligned to its element type")]
    Misaligned {
        /// Kernel.
        kernel: &'static str,
        /// Parameter.
        param: &'static str,
    },
    /// A scalar has a value for which the kernel is not defined.
    #[error("{kernel}: {param} = {value}: {reason}")]
    Value {
        /// Kernel.
        kernel: &'static str,
        /// Parameter.
        param: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        reason: &'static str,
    },
}

/// Types that scalars and shapes are made of.
pub(crate) trait Scalar: Copy {
    const TYPE: ScalarType;
    fn arg<B>(self) -> Arg<B>;
    fn from_arg<B>(arg: Option<Arg<B>>) -> Option<Self>;
    /// The value inside a shape expression; floats do not occur there.
    fn dim(self) -> u64;
}

impl Scalar for u32 {
    const TYPE: ScalarType = ScalarType::U32;
    fn arg<B>(self) -> Arg<B> {
        Arg::U32(self)
    }
    fn from_arg<B>(arg: Option<Arg<B>>) -> Option<Self> {
        if let Some(Arg::U32(value)) = arg { Some(value) } else { None }
    }
    fn dim(self) -> u64 {
        u64::from(self)
    }
}

impl Scalar for f32 {
    const TYPE: ScalarType = ScalarType::F32;
    fn arg<B>(self) -> Arg<B> {
        Arg::F32(self)
    }
    fn from_arg<B>(arg: Option<Arg<B>>) -> Option<Self> {
        if let Some(Arg::F32(value)) = arg { Some(value) } else { None }
    }
    fn dim(self) -> u64 {
        0
    }
}

/// Types that buffers are made of.
pub(crate) trait Element: Pod {
    const ELEM: Elem;
}

macro_rules! elements {
    ($($ty:ty => $elem:ident),* $(,)?) => {
        $(impl Element for $ty { const ELEM: Elem = Elem::$elem; })*
    };
}
elements! {
    u8 => U8, i8 => I8, u32 => U32, half::f16 => F16, f32 => F32,
    f64 => F64,
    q4k_soa::Q8Group => Q8Group, crate::Candidate => Candidate, crate::SamplingPack => SamplingPack,
}

pub(crate) fn check_len<B>(
    kernel: Kernel,
    param: &'static str,
    buffer: B,
    needed_bytes: u64,
    found_bytes: u64,
) -> Result<Arg<B>, ParamError> {
    if found_bytes < needed_bytes {
        let kernel = kernel.name();
        return Err(ParamError::ShortBuffer { kernel, param, needed_bytes, found_bytes });
    }
    Ok(Arg::Buffer(buffer))
}

/// The first `elems` elements of a shared slice.
pub(crate) fn bind_read<'a, T: Element>(
    kernel: Kernel,
    param: &'static str,
    arg: Option<Arg<Slice<'a>>>,
    elems: u64,
) -> Result<&'a [T], ParamError> {
    let bytes: &'a [u8] = match arg {
        Some(Arg::Buffer(Slice::Shared(bytes))) => bytes,
        Some(Arg::Buffer(Slice::Exclusive(bytes))) => bytes,
        _ => return Err(ParamError::Mismatch { kernel: kernel.name(), param }),
    };
    let len = checked_len::<T>(kernel, param, bytes.len(), elems)?;
    bytemuck::try_cast_slice(&bytes[..len])
        .map_err(|_| ParamError::Misaligned { kernel: kernel.name(), param })
}

/// The first `elems` elements of an exclusive slice.
pub(crate) fn bind_write<'a, T: Element>(
    kernel: Kernel,
    param: &'static str,
    arg: Option<Arg<Slice<'a>>>,
    elems: u64,
) -> Result<&'a mut [T], ParamError> {
    let Some(Arg::Buffer(Slice::Exclusive(bytes))) = arg else {
        return Err(ParamError::Mismatch { kernel: kernel.name(), param });
    };
    let len = checked_len::<T>(kernel, param, bytes.len(), elems)?;
    bytemuck::try_cast_slice_mut(&mut bytes[..len])
        .map_err(|_| ParamError::Misaligned { kernel: kernel.name(), param })
}

fn checked_len<T>(
    kernel: Kernel,
    param: &'static str,
    found: usize,
    elems: u64,
) -> Result<usize, ParamError> {
    let needed_bytes = elems.saturating_mul(size_of::<T>() as u64);
    if needed_bytes > found as u64 {
        return Err(ParamError::ShortBuffer {
            kernel: kernel.name(),
            param,
            needed_bytes,
            found_bytes: found as u64,
        });
    }
    Ok(needed_bytes as usize)
}

/// Declares the parameters of an operation: buffers with access, element type and shape (in
/// elements, over the scalars), then scalars; the CUDA signature has the same order.
///
/// Makes `Args<B>` (what a recorder fills in), `PARAMS` (the signature) and `Bound` (the typed
/// slices of the twin). Access is one of `read`, `write`, `update`, and `maybe` for a buffer
/// that is read and may be null.
macro_rules! kernel_params {
    (
        buffers { $( $(#[$bdoc:meta])* $access:ident $b:ident : $ty:ty [ $shape:expr ], )* }
        scalars { $( $(#[$sdoc:meta])* $s:ident : $sty:ty, )* }
    ) => {
        /// Arguments of a launch.
        pub struct Args<B> {
            $( $(#[$bdoc])* pub $b: $crate::params::recorded_type!($access B), )*
            $( $(#[$sdoc])* pub $s: $sty, )*
        }

        /// The signature.
        pub const PARAMS: &[$crate::params::Param] = &[
            $( $crate::params::Param {
                name: stringify!($b),
                kind: $crate::params::ParamKind::Buffer {
                    access: $crate::params::access!($access),
                    elem: <$ty as $crate::params::Element>::ELEM,
                    optional: $crate::params::optional!($access),
                },
                shape: stringify!($shape),
            }, )*
            $( $crate::params::Param {
                name: stringify!($s),
                kind: $crate::params::ParamKind::Scalar(<$sty as $crate::params::Scalar>::TYPE),
                shape: "",
            }, )*
        ];
        const _: () = assert!(PARAMS.len() <= $crate::params::MAX_PARAMS);

        impl<B: Copy> Args<B> {
            /// The arguments in the order of the signature, every buffer checked to have the
            /// bytes of its shape; `len_bytes` tells how many it has.
            #[allow(unused_variables)]
            pub fn list(
                &self,
                kernel: $crate::table::Kernel,
                len_bytes: impl Fn(B) -> u64,
            ) -> Result<$crate::params::ArgList<B>, $crate::params::ParamError> {
                $( let $s = $crate::params::Scalar::dim(self.$s); )*
                Ok(vec![
                    $( $crate::params::record!($access kernel, len_bytes, $b, self.$b,
                        (size_of::<$ty>() as u64).saturating_mul($shape)), )*
                    $( $crate::params::Scalar::arg(self.$s), )*
                ])
            }
        }

        /// The same arguments as a twin sees them.
        pub(crate) struct Bound<'a> {
            $( pub(crate) $b: $crate::params::bound_type!($access 'a $ty), )*
            $( #[allow(dead_code)] pub(crate) $s: $sty, )*
        }

        impl<'a> Bound<'a> {
            #[allow(unused_variables, unused_assignments)]
            pub(crate) fn bind(
                kernel: $crate::table::Kernel,
                mut args: $crate::params::TwinArgs<'a>,
            ) -> Result<Self, $crate::params::ParamError> {
                let mut index = 0;
                $( let $b = args.take(index); index += 1; )*
                $(
                    let $s = <$sty as $crate::params::Scalar>::from_arg(args.take(index)).ok_or(
                        $crate::params::ParamError::Mismatch {
                            kernel: kernel.name(),
                            param: stringify!($s),
                        },
                    )?;
                    index += 1;
                )*
                let mut elems = {
                    $( let $s = $crate::params::Scalar::dim($s); )*
                    [ $( { let elems: u64 = $shape; elems } ),* ].into_iter()
                };
                Ok(Self {
                    $( $b: $crate::params::bind!($access kernel, stringify!($b), $b,
                        elems.next().unwrap_or(0)), )*
                    $( $s, )*
                })
            }
        }
    };
}

macro_rules! recorded_type {
    (maybe $b:ident) => { Option<$b> };
    ($access:ident $b:ident) => { $b };
}
macro_rules! bound_type {
    (read $l:lifetime $ty:ty) => { &$l [$ty] };
    (maybe $l:lifetime $ty:ty) => { Option<&$l [$ty]> };
    ($access:ident $l:lifetime $ty:ty) => { &$l mut [$ty] };
}
macro_rules! access {
    (write) => {
        $crate::params::Access::Write
    };
    (update) => {
        $crate::params::Access::Update
    };
    ($access:ident) => {
        $crate::params::Access::Read
    };
}
macro_rules! optional {
    (maybe) => {
        true
    };
    ($access:ident) => {
        false
    };
}
macro_rules! record {
    (maybe $kernel:expr, $len:expr, $name:ident, $buffer:expr, $bytes:expr) => {
        match $buffer {
            Some(buffer) => {
                $crate::params::record!(read $kernel, $len, $name, buffer, $bytes)
            }
            None => $crate::params::Arg::Null,
        }
    };
    ($access:ident $kernel:expr, $len:expr, $name:ident, $buffer:expr, $bytes:expr) => {
        $crate::params::check_len($kernel, stringify!($name), $buffer, $bytes, $len($buffer))?
    };
}
macro_rules! bind {
    (read $kernel:expr, $name:expr, $arg:expr, $elems:expr) => {
        $crate::params::bind_read($kernel, $name, $arg, $elems)?
    };
    (maybe $kernel:expr, $name:expr, $arg:expr, $elems:expr) => {{
        let elems = $elems;
        match $arg {
            Some($crate::params::Arg::Null) => None,
            arg => Some($crate::params::bind_read($kernel, $name, arg, elems)?),
        }
    }};
    ($access:ident $kernel:expr, $name:expr, $arg:expr, $elems:expr) => {
        $crate::params::bind_write($kernel, $name, $arg, $elems)?
    };
}
pub(crate) use {access, bind, bound_type, kernel_params, optional, record, recorded_type};
