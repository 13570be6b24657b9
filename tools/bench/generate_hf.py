"""The program to compare `megatron generate` with: Hugging Face transformers, greedily, with its key/value cache.

  python generate_hf.py make FOLDER                 # a GPT-2 of 124 M parameters with random weights, and a tokenizer with the same number of words
  python generate_hf.py run FOLDER fp32 128 2       # dtype, new tokens, threads

Prints tokens per second, without the first one, which is the prompt's.
"""

import sys
import time

import torch

PROMPT = "t1 t2 t3 t4 t5 t6 t7 t8"


def make(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=50304, bos_token_id=None, eos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(f"{folder}/tokenizer.json")


def run(folder, dtype, tokens, threads):
    from tokenizers import Tokenizer
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).eval()
    prompt = torch.tensor([Tokenizer.from_file(f"{folder}/tokenizer.json").encode(PROMPT).ids])

    def seconds(new):
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return time.perf_counter() - start

    seconds(4)
    print(f"{(tokens - 1) / (seconds(tokens) - seconds(1)):.1f}")


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    make(folder) if what == "make" else run(folder, rest[0], int(rest[1]), int(rest[2]))
