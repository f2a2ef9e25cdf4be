//! The macros that write rows of the table.
//!
//! `intrinsic!` is for functions of plain values: the row's host text calls the Rust meaning back. `row!` is for what
//! is generic or takes memory: the Rust function stands beside it, and both texts are given whole.

/// A function of plain values. The body is its Rust meaning, `cuda` the body of its CUDA text.
macro_rules! intrinsic {
    (
        $(#[doc = $doc:literal])*
        $scope:ident $(since $since:literal)? fn $name:ident($($param:ident: $ty:ident),* $(,)?) $(-> $output:ident)? $body:block
        cuda $cuda:literal
    ) => {
        $(#[doc = $doc])*
        #[track_caller]
        #[allow(clippy::too_many_arguments)]
        pub fn $name($($param: $ty),*) $(-> $output)? $body

        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        pub enum $name {}

        impl $name {
            pub const ROW: &'static $crate::definition::Intrinsic = {
                #[allow(clippy::too_many_arguments)]
                extern "C-unwind" fn hook($($param: $ty),*) $(-> $output)? {
                    $name($($param),*)
                }
                fn address() -> *const () {
                    hook as *const ()
                }
                static ROW: $crate::definition::Intrinsic = $crate::definition::Intrinsic {
                    name: stringify!($name),
                    scope: $crate::definition::Scope::$scope,
                    since: $crate::intrinsics::rows::since!($($since)?),
                    doc: concat!($($doc, "\n"),*),
                    cuda: concat!(
                        "__device__ __forceinline__ ",
                        $crate::intrinsics::rows::output_name!($($output)?),
                        " ",
                        stringify!($name),
                        "(",
                        $crate::intrinsics::rows::parameter_list!($($param $ty)*),
                        ") { ",
                        $cuda,
                        " }"
                    ),
                    host: $crate::definition::HostText::Hook($crate::definition::Hook(address)),
                    signature: (
                        $crate::intrinsics::rows::output_name!($($output)?),
                        &[$((stringify!($param), stringify!($ty))),*],
                    ),
                    needs: &[],
                };
                &ROW
            };

            #[doc(hidden)]
            pub fn callee() -> $crate::definition::Callee {
                $crate::definition::Callee::Intrinsic(Self::ROW)
            }
        }
    };
}

/// A row whose Rust function is written beside it.
macro_rules! row {
    (
        $(#[doc = $doc:literal])*
        $scope:ident $name:ident $(since $since:literal)? $(needs [$($need:path),*])?
        cuda $cuda:literal
        host $host:tt
    ) => {
        #[doc(hidden)]
        #[allow(non_camel_case_types)]
        pub enum $name {}

        impl $name {
            pub const ROW: &'static $crate::definition::Intrinsic = {
                static ROW: $crate::definition::Intrinsic = $crate::definition::Intrinsic {
                    name: stringify!($name),
                    scope: $crate::definition::Scope::$scope,
                    since: $crate::intrinsics::rows::since!($($since)?),
                    doc: concat!($($doc, "\n"),*),
                    cuda: $cuda,
                    host: $crate::intrinsics::rows::host_text!($host),
                    signature: ("", &[]),
                    needs: &[$($(<$need>::callee),*)?],
                };
                &ROW
            };

            #[doc(hidden)]
            pub fn callee() -> $crate::definition::Callee {
                $crate::definition::Callee::Intrinsic(Self::ROW)
            }
        }
    };
}

macro_rules! host_text {
    (same) => {
        $crate::definition::HostText::Same
    };
    ($text:literal) => {
        $crate::definition::HostText::Text($text)
    };
}

/// Every GPU of ours has what is not said to be newer.
macro_rules! since {
    () => {
        80
    };
    ($since:literal) => {
        $since
    };
}

macro_rules! output_name {
    () => {
        "void"
    };
    ($output:ident) => {
        stringify!($output)
    };
}

macro_rules! parameter_list {
    () => { "" };
    ($param:ident $ty:ident) => { concat!(stringify!($ty), " ", stringify!($param)) };
    ($param:ident $ty:ident $($rest:ident)+) => {
        concat!(stringify!($ty), " ", stringify!($param), ", ", $crate::intrinsics::rows::parameter_list!($($rest)+))
    };
}

pub(crate) use {host_text, intrinsic, output_name, parameter_list, row, since};
