/**
 * The types of the explorer: what a manifest contains, what is selected, and what a view is. There is no code here.
 *
 * A step, position, layer or head is a number; a word is an index into `run.words`, -1 for none.
 *
 * @typedef {{data: ArrayLike<number>, shape: number[], scale: number, none: number|null}} Table
 * @typedef {{header: any, tables: Record<string, Table>, [kept: string]: any}} Chunk
 * @typedef {{background: string, ink: string, rgb: number[]}} Paint
 *
 * @typedef {Object} Cell  one cell of a heat map
 * @property {number} value  0 to 1 on the scale of colours; NaN where there is none
 * @property {string} [text]  shown where the cells are wide enough
 * @property {string} [kind]  marks, separated by spaces: "new" (a frame), "given" (soft ink), "hit" (bold), "guess" (italic),
 *   "diff" (a coloured corner), "commits" (an upper edge), "masked" (a dot without a text), "plain" (NaN without hatching)
 *
 * @typedef {{text: string, title: string, muted?: boolean}} Column  the head of a column; muted ones are in italics
 *
 * @typedef {Object} Model  one of the models of a manifest
 * @property {string} name
 * @property {number} n_layers
 * @property {number} n_heads
 * @property {boolean} grows  whether its text grows at its end
 * @property {boolean} masks  whether it has a [MASK]
 * @property {number} [shift]  1 where a token is predicted at the position before its own, otherwise 0
 * @property {string[]} samplers
 * @property {number|null} length  of the canvases that it was trained on
 * @property {string|null} [weights]  the first characters of their SHA-256
 *
 * @typedef {Object} Intervention  see `diffusion_lens/explorer/spec.py`
 * @property {string} what  "force", "zero", "mean" or "patch"
 * @property {number} [step]
 * @property {number} [position]
 * @property {string|null} [token]  null masks the position again
 * @property {string} [site]
 * @property {number} [layer]
 * @property {number|null} [head]
 * @property {number[]|null} [positions]
 * @property {number[]|null} [steps]
 * @property {string|null} [source]
 *
 * @typedef {Object} Spec  a run that can be computed; see `diffusion_lens/explorer/spec.py`
 * @property {number} model
 * @property {string} prompt
 * @property {number|null} length
 * @property {number} steps
 * @property {string|null} sampler
 * @property {number} cfg_scale
 * @property {number} temperature
 * @property {number} seed
 * @property {string|null} answer
 * @property {number[]|null} subject  first position, and one past the last
 * @property {Intervention[]} interventions
 * @property {string|null} base
 *
 * @typedef {Object} Trace  the traces of one kind of state
 * @property {string} name
 * @property {string} kind
 * @property {number[]} subject
 * @property {number[]} positions
 * @property {number[]} layers
 * @property {number[]} steps
 * @property {string} answer
 * @property {number[]|null} clean
 * @property {number[]|null} corrupted
 * @property {number|null} highest
 * @property {boolean} [lazy]  whether it is computed when somebody asks for it
 *
 * @typedef {{writers: string[], readers: string[], steps: number[], n_edges: number, n_rows: number, n_key_value_heads: number,
 *   side: string}} Circuit
 *
 * @typedef {Object} Run  see `diffusion_lens/explorer/page_of_run.py`
 * @property {string} id
 * @property {number} model  index into the models of the manifest
 * @property {string} label
 * @property {string} prompt
 * @property {string} text
 * @property {Spec|null} spec
 * @property {string|null} base
 * @property {Intervention[]} [changes]  the interventions of a run without a spec
 * @property {string[]} words
 * @property {number} n_steps
 * @property {number[]} steps
 * @property {number[]|null} times
 * @property {number[][]} canvases  words by step and position; one more than steps, unless only what was read is known
 * @property {boolean[]} given
 * @property {boolean[]} real
 * @property {number[]|null} revealed_at
 * @property {number[]|null} opened_at
 * @property {number[]|null} confidence
 * @property {number|null} [end]  position of the first end token of the final canvas
 * @property {{positions: number[], words: number[]}|null} answer
 * @property {{right: boolean, wrote: string, answer: string}|null} [verdict]
 * @property {boolean} [guided]
 * @property {string[]} [warnings]
 * @property {number[][]} [forced]  step and position of each token that an intervention has written
 * @property {number} [fact]  the fact of the table to which it belongs
 * @property {{k: number, steps: number[], committed: number[]|null}|null} predictions
 * @property {{labels: string[], layers: number[], positions: number[], steps: number[], k: number, targets: number[]}|null} lens
 * @property {{layers: number[], n_heads: number, steps: number[]}|null} attention
 * @property {Trace[]} traces
 * @property {Circuit|null} [circuit]  this and the next four are described in `diffusion_lens/pages/views.py`
 * @property {{chunk?: string}|null} [graph]  without a chunk, graphs can be computed
 * @property {{layers: number[], n_experts: number, steps: number[]}|null} [experts]
 * @property {{steps: number[]}|null} [conditioning]
 * @property {{measures: any[], facts: any[], n_facts: number}|null} [signatures]
 * @property {Record<string, string>} missing  by view, what to do to see it
 * @property {Record<string, string>} python  by view, the code that gives its numbers
 *
 * @typedef {Object} Manifest
 * @property {string} title
 * @property {Model[]} models
 * @property {Run[]} runs
 * @property {Fact[]} [facts]
 * @property {Partial<State>} [state]  where the page opens
 *
 * @typedef {{recalled: boolean|null, p: number|null, commitment: number|null, effect: number|null, run?: string|null,
 *   error?: string|null, studied?: string[]}} Measured  error: why there are no values; studied: names of those from a saved result
 * @typedef {{id: number, prompt: string, subject: string|null, answer: string, asked: string|null, trained?: string|null,
 *   values: Record<string, Measured>}} Fact
 *
 * @typedef {{what: string, done: number, of: number}} Progress
 * @typedef {(progress: Progress) => void} Told
 *
 * @typedef {Object} Source  where manifest, chunks and new runs come from; a file has the first two only
 * @property {boolean} live
 * @property {() => Promise<Manifest>} manifest
 * @property {(run: string, name: string, told?: Told, signal?: AbortSignal) => Promise<ArrayBuffer>} chunk
 * @property {(spec: Spec, told?: Told, signal?: AbortSignal) => Promise<Run>} [run]
 * @property {(asked: {id: number, model: number, effect: boolean}, told?: Told, signal?: AbortSignal) => Promise<any>} [fact]
 * @property {(prompt: string) => Promise<{subjects: any[], answers: any[]}>} [suggest]
 * @property {(asked: {runs: string[], state: any, attention: number[], facts: number[]}) => Promise<ArrayBuffer>} [page]
 * @property {() => any} [state]  what a notebook has kept
 * @property {(state: any) => void} [keep]
 * @property {() => void} [close]
 *
 * @typedef {Object} State  what is selected; the address contains all of it
 * @property {string} run  the run whose selection is meant
 * @property {string} compare  the run beside it; "" for none
 * @property {string} left  that of the two which is on the left
 * @property {number} step  the one of the slider; negative for the default, as in the next four
 * @property {number} position
 * @property {number} layer  0 to n_layers: the stream that enters this block, or leaves the last one
 * @property {number} head
 * @property {number|null} key  position that attention reads
 * @property {string} view  the view that is open
 * @property {string} canvas  what the colours of the canvas show
 * @property {string} colour  what the colours of the lens show
 * @property {string} trace  name of the trace
 * @property {string} graph  what is pinned, grouped and selected in the graph, as JSON; "" for nothing
 * @property {boolean} facts  whether the table of facts is open
 * @property {boolean} written  whether the step that wrote the selected token is explained in place of the slider's
 *
 * @typedef {Object} Seen  a selection in one of the runs that are shown, for its canvas, its band and its views
 * @property {Run} run
 * @property {Model} model
 * @property {Run|null} base  the run with which this one is compared
 * @property {number} shown  the step of this run whose canvas is shown
 * @property {number} step  the step that is explained: this one, or the one that wrote the selected token
 * @property {number} position
 * @property {number} layer
 * @property {number} block  the layer as a block, 0 to n_layers - 1
 * @property {number} head
 * @property {number|null} key
 * @property {State} state
 * @property {boolean} dark
 * @property {boolean} live
 * @property {(name: string, run?: Run, told?: Told, signal?: AbortSignal) => Promise<Chunk>} chunk  a chunk of this run, or of another one
 * @property {(name: string) => boolean} loaded  whether a chunk of this run has come already
 * @property {((site?: string) => void)|null} change  open the drawer of interventions; null where nothing can be computed
 * @property {(() => void)|null} ask  ask for answer and subject; null where nothing can be computed
 * @property {() => boolean} current  whether nothing else has been selected since
 * @property {(change: Partial<State>) => Promise<void>} select  select something in this run
 * @property {(text: string) => void} say  show a text in the status line
 * @property {(name: string, task: (told: Told, signal: AbortSignal) => Promise<any>) => Promise<any>} work  do what takes
 *   long, with progress and a way to cancel it; null where it failed, which an alert says, or was cancelled
 * @property {(view: string, title: string, values?: Record<string, any>) => void} code  show the Python code of a view
 *
 * @typedef {Object} Pane  the elements of a view for one run
 * @property {HTMLElement} element
 * @property {(seen: Seen) => void|Promise<void>} draw  show a selection; after each `await` it asks `seen.current()`
 * @property {(position: number) => void} [hover]  mark a position under the pointer; -1 for none
 * @property {() => Saved[]} [files]  what the menu "Share" can save of it
 *
 * @typedef {{name: string, help: string, ending: string, type: string, make: () => Promise<BlobPart>}} Saved
 *
 * @typedef {Object} View  one small file under views/
 * @property {string} name  in the address, in `run.python` and `run.missing`, and as a class of CSS
 * @property {string} title  text of its tab
 * @property {(seen: Seen) => string|null} missing  why there is nothing to show for this selection; null if there is something
 * @property {() => Pane} create  called once for each run that can be shown at the same time
 * @property {string} [help]  what the view shows, in one sentence
 */

export {};
